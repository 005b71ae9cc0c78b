// SPDX-License-Identifier: Apache-2.0
// The GPUs that the CUDA runtime sees. Built where the CUDA toolkit is found; no context is made.
#pragma once

#include <string>
#include <vector>

namespace logitless::cuda {

struct GpuDevice {
  std::string name;
  int major = 0;  // compute capability
  int minor = 0;
  int multiprocessors = 0;
};

// Empty where there is no GPU or no driver; `reason` then says why.
std::vector<GpuDevice> gpu_devices(std::string& reason);

// The runtime that this library was built with, as 1000·major + 10·minor.
int runtime_version();

}  // namespace logitless::cuda
