/* SPDX-License-Identifier: Apache-2.0 */
/* The flat C API: the C++ API of logitless/head.h for every language that can call C (C11).
 *
 * Every function returns a status; on failure logitless_last_error() is one sentence with the values.
 * No exception crosses. Nothing is kept of what a pointer points to past the call, except the group's
 * callbacks and user pointer, which must stay valid as long as the context lives.
 * All tensors are the caller's; a tensor with ndim 0 is absent.
 */
#ifndef LOGITLESS_C_API_H_
#define LOGITLESS_C_API_H_

#include <stdint.h>

#if defined(__GNUC__)
#define LOGITLESS_API __attribute__((visibility("default")))
#else
#define LOGITLESS_API
#endif

#ifdef __cplusplus
extern "C" {
#endif

typedef enum logitless_status {
  LOGITLESS_OK = 0,
  LOGITLESS_VALUE_ERROR = 1,   /* a value or a shape is wrong */
  LOGITLESS_TYPE_ERROR = 2,    /* a dtype or a device is wrong */
  LOGITLESS_STATE_ERROR = 3,   /* the call does not fit what was configured or saved before */
  LOGITLESS_MEMORY_ERROR = 4,  /* the bytes wanted could not be had */
  LOGITLESS_TIMEOUT = 5,       /* a rank did not come in time */
  LOGITLESS_UNAVAILABLE = 6,   /* this build or machine cannot do it */
  LOGITLESS_INTERNAL_ERROR = 7 /* none of the above: a bug of ours */
} logitless_status;

/* The sentence of this thread's last failed call, or "". Valid until this thread's next failed call. */
LOGITLESS_API const char* logitless_last_error(void);

/* What ran the last call of this thread: "cpu". */
LOGITLESS_API const char* logitless_last_backend(void);

/* --- tensors --------------------------------------------------------------------------------------- */

enum { LOGITLESS_FLOAT32 = 0, LOGITLESS_BFLOAT16 = 1, LOGITLESS_INT32 = 2, LOGITLESS_INT64 = 3 };
enum { LOGITLESS_CPU = 0, LOGITLESS_CUDA = 1 };

/* One or two dimensions; strides count elements. All zero: absent. */
typedef struct logitless_tensor {
  void* data;
  int32_t dtype;
  int32_t device_type;
  int32_t device_index;
  int32_t ndim;
  int64_t shape[2];
  int64_t strides[2];
} logitless_tensor;

/* Contiguous host memory; a matrix is row-major. */
LOGITLESS_API logitless_tensor logitless_vector(void* data, int32_t dtype, int64_t size);
LOGITLESS_API logitless_tensor logitless_matrix(void* data, int32_t dtype, int64_t rows,
                                                int64_t columns);

/* --- the group and the context --------------------------------------------------------------------- */

/* The ranks that share one vocabulary. A callback returns 0, or anything else to fail the call it serves.
 * Blocks are contiguous, of equal size on every rank, and live on the given device; `what` names the
 * exchange for error messages. Callbacks of one context are never called from two threads at once. */
typedef struct logitless_group {
  int32_t rank;
  int32_t size;
  void* user; /* handed to every callback */
  /* all[r] = mine of rank r; `all` holds `size` blocks of `bytes`. */
  int (*all_gather)(void* user, const void* mine, void* all, int64_t bytes, int32_t device_type,
                    int32_t device_index, const char* what);
  /* receive[r] = block `rank` of rank r's `send`; both hold `size` blocks of `bytes`. */
  int (*all_to_all)(void* user, const void* send, void* receive, int64_t bytes, int32_t device_type,
                    int32_t device_index, const char* what);
  /* May be null. This rank gives up; the transport may tell the others why. */
  void (*abort)(void* user, const char* reason);
} logitless_group;

/* One rank's membership in a group, its threads, and its workspace. Calls on one context are serialised. */
typedef struct logitless_context logitless_context;

/* group null: one rank. threads 0: one worker per core this process may run on. */
LOGITLESS_API logitless_status logitless_context_create(const logitless_group* group,
                                                        int32_t threads,
                                                        logitless_context** context);
/* Null is allowed. Nothing collective happens. */
LOGITLESS_API void logitless_context_destroy(logitless_context* context);

/* --- the operation --------------------------------------------------------------------------------- */

enum { LOGITLESS_MEMORY_AUTO = -1, LOGITLESS_MEMORY_STASH = -2, LOGITLESS_MEMORY_RECOMPUTE = -3 };

/* Fields may be added at the end: struct_size says which of them the caller knows. Start from
 * LOGITLESS_OPTIONS_INIT and set what differs from the defaults. */
typedef struct logitless_options {
  int64_t struct_size;       /* sizeof(logitless_options) */
  int64_t ignore_index;      /* -100; rows with this target give 0 and no gradient */
  int64_t vocab_start;       /* -1: agreed by the group from the sizes of the shards */
  int64_t vocab_size;        /* -1: the sum of the shards */
  int64_t memory;            /* LOGITLESS_MEMORY_*, or an upper bound in bytes (>= 0) */
  float temperature;         /* 1; ignored where logitless_inputs::temperature is present */
  int32_t sequence_parallel; /* 0; 1: x and its gradient are this rank's token shard */
  int32_t assume_uniform;    /* 0; 1: skip the per-call header, the caller vouches for agreement */
  int32_t reserved;          /* 0 */
} logitless_options;

/* The defaults, and the struct_size of the library's own header. */
#define LOGITLESS_OPTIONS_INIT \
  {(int64_t)sizeof(logitless_options), -100, -1, -1, LOGITLESS_MEMORY_AUTO, 1.0F, 0, 0, 0}

typedef struct logitless_inputs {
  logitless_tensor x;           /* [M, H] bfloat16 or float32 (sequence parallel: [M_r, H]) */
  logitless_tensor weight;      /* [V_r, H] of x's dtype; one of its strides is 1 */
  logitless_tensor target;      /* [M] int64 or int32, global ids or ignore_index */
  logitless_tensor temperature; /* absent, or [M] float32, positive */
} logitless_inputs;

typedef struct logitless_wanted {
  int32_t entropy;
  int32_t input_grad;
  int32_t weight_grad;
} logitless_wanted;

typedef struct logitless_plan {
  int64_t stash_columns;   /* vocabulary rows whose exponentials are kept for backward */
  int64_t token_pitch;     /* tokens rounded up to 16: the row length of the stash */
  int64_t rows_bytes;      /* of logitless_saved::rows */
  int64_t stash_bytes;     /* of logitless_saved::stash */
  int64_t workspace_bytes; /* needed only while a call runs */
} logitless_plan;

typedef struct logitless_outputs {
  logitless_tensor nll;     /* [M] float32, nats */
  logitless_tensor lse;     /* [M] float32, nats */
  logitless_tensor entropy; /* absent (costs nothing), or [M] float32, nats */
} logitless_outputs;

/* What backward needs; sizes come from the plan. */
typedef struct logitless_saved {
  logitless_tensor rows; /* [6, M] float32 */
  logitless_tensor
      stash; /* [stash_columns, token_pitch] of x's dtype; absent when stash_columns is 0 */
} logitless_saved;

/* Gradients of the loss with respect to the outputs, float32 [M] of any stride; absent: zero. */
typedef struct logitless_upstream {
  logitless_tensor nll;
  logitless_tensor entropy;
  logitless_tensor lse;
} logitless_upstream;

typedef struct logitless_gradients {
  logitless_tensor x;        /* absent (not wanted), or like logitless_inputs::x */
  logitless_tensor weight;   /* absent (not wanted), or [V_r, H] of x's dtype or float32 */
  int32_t accumulate_weight; /* 1: add to `weight` instead of writing it */
} logitless_gradients;

/* options null: the defaults. Exchanges nothing and allocates nothing. */
LOGITLESS_API logitless_status logitless_plan_call(logitless_context* context,
                                                   const logitless_inputs* inputs,
                                                   const logitless_options* options,
                                                   const logitless_wanted* wanted,
                                                   logitless_plan* plan);

/* Collective. saved null: no backward will come. */
LOGITLESS_API logitless_status logitless_forward(logitless_context* context,
                                                 const logitless_inputs* inputs,
                                                 const logitless_options* options,
                                                 const logitless_outputs* outputs,
                                                 const logitless_saved* saved);

/* Collective. The formulas are those of logitless::backward in logitless/head.h. */
LOGITLESS_API logitless_status logitless_backward(logitless_context* context,
                                                  const logitless_inputs* inputs,
                                                  const logitless_options* options,
                                                  const logitless_saved* saved,
                                                  const logitless_upstream* upstream,
                                                  const logitless_gradients* gradients);

/* For a rank that cannot make the call `phase`: its peers fail with this status and message instead of
 * waiting. Counts as the call itself. */
LOGITLESS_API logitless_status logitless_announce_failure(logitless_context* context,
                                                          const char* phase,
                                                          logitless_status status,
                                                          const char* message);

/* --- workspace ------------------------------------------------------------------------------------- */

/* The largest call that a configured context takes. */
typedef struct logitless_capacity {
  int64_t tokens;
  int64_t hidden;
  int64_t vocab_rows;
  int32_t dtype;
} logitless_capacity;

/* Exact bytes of a configuration; allocates nothing. LOGITLESS_STATE_ERROR where another is reserved. */
LOGITLESS_API logitless_status logitless_workspace_query(const logitless_context* context,
                                                         const logitless_capacity* capacity,
                                                         int64_t* bytes);
/* Collective. Reserves the workspace, immutable until released. */
LOGITLESS_API logitless_status logitless_workspace_configure(logitless_context* context,
                                                             const logitless_capacity* capacity);
/* Frees the workspace; the next call sizes its own. */
LOGITLESS_API logitless_status logitless_workspace_release(logitless_context* context);

#ifdef __cplusplus
} /* extern "C" */
#endif

#endif /* LOGITLESS_C_API_H_ */
