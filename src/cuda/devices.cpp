// SPDX-License-Identifier: Apache-2.0
#include "cuda/devices.h"

#include <cuda_runtime_api.h>

namespace logitless::cuda {

namespace {

int attribute(cudaDeviceAttr name, int device) {
  int value = 0;
  return cudaDeviceGetAttribute(&value, name, device) == cudaSuccess ? value : 0;
}

}  // namespace

std::vector<GpuDevice> gpu_devices(std::string& reason) {
  int count = 0;
  const cudaError_t status = cudaGetDeviceCount(&count);
  if (status != cudaSuccess) {
    reason = cudaGetErrorString(status);
    (void)cudaGetLastError();  // the next call of somebody else must not see it
    return {};
  }
  if (count == 0) reason = "the driver sees no GPU";
  std::vector<GpuDevice> devices;
  for (int device = 0; device < count; ++device) {
    cudaDeviceProp properties{};
    if (cudaGetDeviceProperties(&properties, device) != cudaSuccess) continue;
    devices.push_back({properties.name, attribute(cudaDevAttrComputeCapabilityMajor, device),
                       attribute(cudaDevAttrComputeCapabilityMinor, device),
                       attribute(cudaDevAttrMultiProcessorCount, device)});
  }
  return devices;
}

int runtime_version() {
  int version = 0;
  return cudaRuntimeGetVersion(&version) == cudaSuccess ? version : 0;
}

}  // namespace logitless::cuda
