// SPDX-License-Identifier: Apache-2.0
// Writes what the model says about every case: the number of results; then of each the bytes of a
// value, the number of values, and the values.
//
//   g++ -std=c++20 -O2 -ffp-contract=off -Isrc -Itests/model tests/model/gpu/model_results.cpp
//       src/cuda/hw/model/engine/*.cpp -o model_results && ./model_results results.bin
#include <cstdio>
#include <fstream>

#include "gpu/cases.h"
#include "gpu/model_machine.h"

namespace {

void put(std::ofstream& file, uint64_t number) {
  file.write(reinterpret_cast<const char*>(&number), sizeof(number));
}

}  // namespace

int main(int count, char** arguments) {
  using namespace logitless::model_test;
  if (count != 2) {
    std::fprintf(stderr, "usage: %s FILE\n", arguments[0]);
    return 2;
  }
  std::vector<Result> results;
  try {
    run_cases<ModelMachine>([&](const Result& result) { results.push_back(result); });
  } catch (const std::exception& error) {
    std::fprintf(stderr, "after %zu results: %s\n", results.size(), error.what());
    return 1;
  }
  std::ofstream file(arguments[1], std::ios::binary);
  put(file, results.size());
  size_t bytes = 0;
  for (const Result& result : results) {
    put(file, bytes_of(result.values));
    put(file, result.bytes.size() / bytes_of(result.values));
    file.write(reinterpret_cast<const char*>(result.bytes.data()),
               static_cast<std::streamsize>(result.bytes.size()));
    bytes += result.bytes.size();
  }
  file.close();
  if (!file) {
    std::fprintf(stderr, "%s: could not be written\n", arguments[1]);
    return 1;
  }
  std::printf("%s: %zu results, %zu bytes\n", arguments[1], results.size(), bytes);
  return 0;
}
