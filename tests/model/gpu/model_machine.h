// SPDX-License-Identifier: Apache-2.0
// A machine for cases.h: the device model, with the tensor cores' own accumulation.
#pragma once

#include <stdexcept>
#include <vector>

#include "cuda/hw/hw.h"

namespace logitless::model_test {

class ModelMachine {
 public:
  explicit ModelMachine(uint64_t seed = 1) : seed_(seed) {}

  template <class T>
  hw::Global<T> upload(const std::vector<T>& values) {
    return world_.upload("array " + std::to_string(++arrays_), values);
  }
  template <class T>
  hw::Global<T> filled(int64_t count, T value) {
    return upload(std::vector<T>(static_cast<size_t>(count), value));
  }
  template <class T>
  std::vector<T> download(hw::Global<T> p, int64_t count) const {
    return world_.download(p, count);
  }
  /// Throws what the model has found.
  template <class K>
  void launch(int clusters, const typename K::Params& params) {
    const auto report = hw::launch<K>(world_, clusters, params, {.seed = seed_, .exact = true});
    if (!report.ok) throw std::runtime_error(report.what);
  }

 private:
  uint64_t seed_;
  int arrays_ = 0;
  hw::model::World world_;
};

}  // namespace logitless::model_test
