/* SPDX-License-Identifier: Apache-2.0 */
/* A user who writes C: forward and backward of one small head, checked by the C++ side of this test. */
#include <stdlib.h>
#include <string.h>

#include "logitless/c_api.h"

int c11_step(float* x, float* weight, int64_t* target, int64_t tokens, int64_t hidden,
             int64_t vocab, float* nll, float* dx, float* dweight, char* error, size_t error_size);

static int failed(char* error, size_t error_size) {
  strncpy(error, logitless_last_error(), error_size - 1);
  error[error_size - 1] = '\0';
  return 1;
}

int c11_step(float* x, float* weight, int64_t* target, int64_t tokens, int64_t hidden,
             int64_t vocab, float* nll, float* dx, float* dweight, char* error, size_t error_size) {
  int result = 0;
  logitless_context* context = NULL;
  logitless_options options = LOGITLESS_OPTIONS_INIT;
  logitless_inputs inputs = {0};
  logitless_outputs outputs = {0};
  logitless_saved saved = {0};
  logitless_upstream upstream = {0};
  logitless_gradients gradients = {0};
  logitless_wanted wanted = {0};
  logitless_plan plan;
  float* lse = (float*)malloc((size_t)tokens * sizeof(float));
  float* ones = (float*)malloc((size_t)tokens * sizeof(float));
  void* rows = NULL;
  void* stash = NULL;
  int64_t i;

  for (i = 0; i < tokens; ++i) ones[i] = 1.0F;
  options.memory = LOGITLESS_MEMORY_STASH;
  inputs.x = logitless_matrix(x, LOGITLESS_FLOAT32, tokens, hidden);
  inputs.weight = logitless_matrix(weight, LOGITLESS_FLOAT32, vocab, hidden);
  inputs.target = logitless_vector(target, LOGITLESS_INT64, tokens);
  outputs.nll = logitless_vector(nll, LOGITLESS_FLOAT32, tokens);
  outputs.lse = logitless_vector(lse, LOGITLESS_FLOAT32, tokens);
  upstream.nll = logitless_vector(ones, LOGITLESS_FLOAT32, tokens);
  gradients.x = logitless_matrix(dx, LOGITLESS_FLOAT32, tokens, hidden);
  gradients.weight = logitless_matrix(dweight, LOGITLESS_FLOAT32, vocab, hidden);
  wanted.input_grad = wanted.weight_grad = 1;

  if (logitless_context_create(NULL, 1, &context) != LOGITLESS_OK ||
      logitless_plan_call(context, &inputs, &options, &wanted, &plan) != LOGITLESS_OK) {
    result = failed(error, error_size);
  } else {
    rows = malloc((size_t)plan.rows_bytes);
    stash = malloc((size_t)plan.stash_bytes);
    saved.rows = logitless_matrix(rows, LOGITLESS_FLOAT32, 6, tokens);
    saved.stash = logitless_matrix(stash, LOGITLESS_FLOAT32, plan.stash_columns, plan.token_pitch);
    if (logitless_forward(context, &inputs, &options, &outputs, &saved) != LOGITLESS_OK ||
        logitless_backward(context, &inputs, &options, &saved, &upstream, &gradients) !=
            LOGITLESS_OK) {
      result = failed(error, error_size);
    }
  }
  logitless_context_destroy(context);
  free(rows);
  free(stash);
  free(lse);
  free(ones);
  return result;
}
