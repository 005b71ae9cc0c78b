// SPDX-License-Identifier: Apache-2.0
// Runs every case on a Hopper GPU and compares with what the model has written: one line of JSON for
// each, with the number of values whose bits differ and the worst difference in units of the last
// place. Whoever reads the lines judges; the exit status tells whether every case ran.
//
//   nvcc -std=c++20 -O3 -Isrc -Itests/model -gencode arch=compute_90a,code=sm_90a -Xptxas -v
//       tests/model/gpu/gpu_results.cu -o gpu_results && ./gpu_results results.bin
#include <algorithm>
#include <cstdio>
#include <fstream>

#include "gpu/cases.h"

namespace logitless::model_test {
namespace {

void check(cudaError_t status, const char* what) {
  if (status == cudaSuccess) return;
  throw std::runtime_error(std::string(what) + ": " + cudaGetErrorString(status));
}

class GpuMachine {
 public:
  GpuMachine() = default;
  GpuMachine(const GpuMachine&) = delete;
  GpuMachine& operator=(const GpuMachine&) = delete;
  ~GpuMachine() {
    for (void* p : arrays_) cudaFree(p);
  }

  template <class T>
  hw::Global<T> upload(const std::vector<T>& values) {
    void* p = nullptr;
    check(cudaMalloc(&p, values.size() * sizeof(T)), "cudaMalloc");
    arrays_.push_back(p);
    check(cudaMemcpy(p, values.data(), values.size() * sizeof(T), cudaMemcpyHostToDevice),
          "upload");
    return hw::Global<T>(static_cast<T*>(p));
  }
  template <class T>
  hw::Global<T> filled(int64_t count, T value) {
    return upload(std::vector<T>(static_cast<size_t>(count), value));
  }
  template <class T>
  std::vector<T> download(hw::Global<T> p, int64_t count) const {
    std::vector<T> values(static_cast<size_t>(count));
    check(cudaMemcpy(values.data(), p.address(), values.size() * sizeof(T), cudaMemcpyDeviceToHost),
          "download");
    return values;
  }
  template <class K>
  void launch(int clusters, const typename K::Params& params) {
    check(hw::launch<K>(clusters, params, cudaStream_t{}), "launch");
    const cudaError_t status = cudaDeviceSynchronize();
    if (status != cudaSuccess) check(status, ("kernel: " + hw::launch_failure<K>()).c_str());
  }

 private:
  std::vector<void*> arrays_;
};

uint64_t number_from(std::ifstream& file) {
  uint64_t number = 0;
  file.read(reinterpret_cast<char*>(&number), sizeof(number));
  return number;
}

/// The next result of the model; throws if it is not of the same kind as `like`.
std::vector<unsigned char> next_result(std::ifstream& file, const Result& like) {
  const uint64_t width = number_from(file), count = number_from(file);
  std::vector<unsigned char> bytes(like.bytes.size());
  if (!file || width != bytes_of(like.values) || width * count != bytes.size()) {
    throw std::runtime_error(like.name + ", " + like.variant + ": expected " +
                             std::to_string(bytes.size()) + " bytes of the model, got " +
                             std::to_string(width) + " x " + std::to_string(count));
  }
  file.read(reinterpret_cast<char*>(bytes.data()), static_cast<std::streamsize>(bytes.size()));
  return bytes;
}

/// A value as an integer whose neighbours are the next values of its type.
int64_t place(const Result& result, const unsigned char* p) {
  uint32_t bits = 0;
  std::memcpy(&bits, p, bytes_of(result.values));
  if (result.values == Values::kI32) return static_cast<int32_t>(bits);
  const uint32_t sign = result.values == Values::kBf16 ? 0x8000U : 0x80000000U;
  return (bits & sign) != 0 ? -static_cast<int64_t>(bits & (sign - 1)) : static_cast<int64_t>(bits);
}

struct Difference {
  size_t count = 0;
  int64_t worst = 0;
};
Difference compare(const Result& gpu, const std::vector<unsigned char>& model) {
  Difference difference;
  const size_t width = bytes_of(gpu.values);
  for (size_t i = 0; i < model.size(); i += width) {
    if (std::memcmp(&gpu.bytes[i], &model[i], width) == 0) continue;
    ++difference.count;
    const int64_t units = place(gpu, &gpu.bytes[i]) - place(gpu, &model[i]);
    difference.worst = std::max(difference.worst, units < 0 ? -units : units);
  }
  return difference;
}

/// `different`: a folder for what the GPU has computed where it differs; null: not written.
void run(const char* path, const char* different) {
  std::ifstream file(path, std::ios::binary);
  const uint64_t expected = number_from(file);
  if (!file) throw std::runtime_error(std::string(path) + ": could not be read");
  check(hw::watch_launches(), "watch_launches");
  uint64_t seen = 0;
  run_cases<GpuMachine>([&](const Result& gpu) {
    const Difference difference = compare(gpu, next_result(file, gpu));
    std::printf(R"({"name": "%s", "variant": "%s", "m": %d, "h": %d, "v": %d, "values": %zu, )"
                R"("differ": %zu, "worst_units": %lld})"
                "\n",
                gpu.name.c_str(), gpu.variant.c_str(), gpu.m, gpu.h, gpu.v,
                gpu.bytes.size() / bytes_of(gpu.values), difference.count,
                static_cast<long long>(difference.worst));
    std::fflush(stdout);
    if (different != nullptr && difference.count > 0) {
      std::ofstream out(different + ("/" + std::to_string(seen)) + ".bin", std::ios::binary);
      out.write(reinterpret_cast<const char*>(gpu.bytes.data()),
                static_cast<std::streamsize>(gpu.bytes.size()));
    }
    ++seen;
  });
  if (seen != expected) {
    throw std::runtime_error(std::string(path) + ": expected " + std::to_string(seen) +
                             " results, got " + std::to_string(expected));
  }
}

}  // namespace
}  // namespace logitless::model_test

int main(int count, char** arguments) {
  if (count != 2 && count != 3) {
    std::fprintf(stderr, "usage: %s FILE [FOLDER]\n", arguments[0]);
    return 2;
  }
  try {
    logitless::model_test::run(arguments[1], count == 3 ? arguments[2] : nullptr);
  } catch (const std::exception& error) {
    std::fprintf(stderr, "%s\n", error.what());
    return 1;
  }
  return 0;
}
