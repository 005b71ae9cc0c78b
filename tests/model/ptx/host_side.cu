// SPDX-License-Identifier: Apache-2.0
// What the layer does on hosts: bits of numbers, refusals, the sentence of a wait that gave up. Prints
// one line for each; test_mirror.py knows them. Needs no GPU and no driver.
#include <cstdio>

#include "cuda/hw/hw.h"

namespace {

struct Smem {
  hw::Buffer<1024> tile;
  hw::Barrier arrived[4];
};
hw::Names names() {
  hw::Names all;
  all.add("tile", &Smem::tile);
  all.add("inputs.arrived", &Smem::arrived);
  return all;
}
void say(const std::string& line) { std::puts(line.c_str()); }

}  // namespace

int main() {
  std::printf("%x %x %x %x\n", hw::bf16_bits(1.00390625F), hw::bf16_bits(1.01171875F),
              hw::bf16_bits(hw::as_float(0xFFFFFFFF)), hw::pack_bf16(1, -2));
  std::printf("%g %x\n", static_cast<double>(hw::bf16_value(0x4049)), hw::as_bits(-0.0F));
  // Refused before the driver is asked: there may be none.
  try {
    hw::tensor_map(hw::Global<float>(reinterpret_cast<float*>(8)), hw::TensorShape{});
  } catch (const std::invalid_argument& error) {
    say(error.what());
  }
  hw::LocalFailure failure{};
  failure.kind = 1;
  failure.block = 5;
  failure.thread = 137;
  failure.seen = 1;
  failure.place = 1024 + 2 * sizeof(hw::Barrier);
  say(hw::ptx::sentence(failure, 2, names()));
  failure.kind = 2;
  failure.expected = 7;
  failure.place = 0xABC0;
  say(hw::ptx::sentence(failure, 1, names()));
}
