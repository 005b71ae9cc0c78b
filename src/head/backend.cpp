// SPDX-License-Identifier: Apache-2.0
#include "head/backend.h"

#if LOGITLESS_HAS_CPU
#include "cpu/backend.h"
#endif

namespace logitless {

const Backend& backend_for(const Device& device) {
#if LOGITLESS_HAS_CPU
  static const cpu::CpuBackend cpu_backend;
  if (device.type == DeviceType::kCpu) return cpu_backend;
  throw Error(ErrorKind::kUnavailable, "device: this build has kernels for the CPU only");
#else
  (void)device;
  throw Error(ErrorKind::kUnavailable,
              "device: this build has no CPU backend (oneDNN was not found)");
#endif
}

}  // namespace logitless
