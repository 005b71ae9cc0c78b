// SPDX-License-Identifier: Apache-2.0
// The operation in plain loops and double precision: the truth that every test compares with.
// One thread, no blocking, nothing saved between forward and backward, no group: the whole vocabulary is
// given as a list of shards and every sum simply runs over all of them.
//
//   z_iv = Σ_h x_ih w_vh        a logit that float32 cannot hold is ±inf, as it is for the real thing
//   s_iv = z_iv / τ_i           m_i = max_v s_iv
//   S_i  = Σ_v exp(s_iv − m_i)  over ids below vocab_size; R_i is the same sum without the target y_i
//   T_i  = Σ_v exp(s_iv − m_i) (s_iv − m_i)
//
//   lse_i     = m_i + log S_i
//   nll_i     = log1p(Σ_{v≠y} exp(s_iv − s_iy)), or (m_i − s_iy) + log S_i where the target is far below m_i
//   entropy_i = max(0, log S_i − T_i / S_i)
//
//   p_iv  = exp(s_iv − m_i) / S_i        1 − p_iy = R_i / S_i: exact for confident rows
//   dz_iv = (1/τ_i) [ p_iv (g_i + q_i + (m_i + T_i/S_i − s_iv) h_i) − g_i 1(v = y_i) ]
//   dz_iy = (1/τ_i) [ p_iy (q_i + (m_i + T_i/S_i − s_iy) h_i) − g_i (1 − p_iy) ]
//   dX = dZ W      dW = dZᵀ X
//
// The shards must cover the ids [0, vocab_size) once. A row with a NaN or +inf logit is NaN, and so are its gradients. A −inf logit has p = 0 and dz = 0 (−g/τ for
// the target, whose nll is +inf); a row of nothing but −inf is NaN. A row whose target is ignore_index is 0
// and takes no part in the gradients, whatever x holds there.
#pragma once

#include <cstdint>
#include <vector>

#include "logitless/tensor.h"

namespace logitless::reference {

struct Shard {
  TensorView weight;        // [V_r, H] bfloat16 or float32, any strides
  int64_t vocab_start = 0;  // global id of its first row
};

struct Inputs {
  TensorView x;                      // [M, H] bfloat16 or float32, any strides
  std::vector<Shard> shards;         // in any order, of any sizes
  TensorView target;                 // [M] int64 or int32, global ids
  TensorView temperature;            // absent, or [M] float32
  float uniform_temperature = 1.0F;  // τ of every token where `temperature` is absent
  int64_t ignore_index = -100;
  int64_t vocab_size = -1;  // ids at or beyond it are padding; −1: there is none
};

struct Statistics {
  std::vector<double> nll;      // [M] nats
  std::vector<double> lse;      // [M] nats
  std::vector<double> entropy;  // [M] nats
};

// Upstream gradients per token, float32 of any stride; an absent one is zero.
struct Upstream {
  TensorView nll;      // g
  TensorView entropy;  // h
  TensorView lse;      // q
};

struct Gradients {
  std::vector<double> x;                    // [M, H]
  std::vector<std::vector<double>> weight;  // [V_r, H] for every shard
};

// Throws Error(kValue) naming the first target that is neither ignore_index nor below the vocabulary's size.
Statistics forward(const Inputs& inputs);

// dZ, one vector per token over all rows of all shards in the order in which the shards are given.
std::vector<std::vector<double>> logit_gradients(const Inputs& inputs, const Upstream& upstream);

Gradients backward(const Inputs& inputs, const Upstream& upstream);

}  // namespace logitless::reference
