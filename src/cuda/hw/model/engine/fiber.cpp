// SPDX-License-Identifier: Apache-2.0
#include "cuda/hw/model/engine/fiber.h"

#include <sys/mman.h>

#include <cstdint>
#include <cstdio>
#include <cstdlib>
#include <vector>

#if defined(__SANITIZE_ADDRESS__)
#include <sanitizer/asan_interface.h>
#include <sanitizer/common_interface_defs.h>
#endif

// LOGITLESS_MODEL_UCONTEXT: the library's switch, which exists everywhere and makes system calls.
#if (defined(__x86_64__) || defined(__aarch64__)) && !defined(LOGITLESS_MODEL_UCONTEXT)
#define LOGITLESS_OWN_SWITCH 1
extern "C" void logitless_model_switch(void** save, void* load);
#else
#define LOGITLESS_OWN_SWITCH 0
#include <ucontext.h>
#endif

#if LOGITLESS_OWN_SWITCH && defined(__x86_64__)
// System V: six registers and the stack pointer survive a call.
asm(R"(
.text
.globl logitless_model_switch
.hidden logitless_model_switch
.type logitless_model_switch,@function
logitless_model_switch:
  pushq %rbp
  pushq %rbx
  pushq %r12
  pushq %r13
  pushq %r14
  pushq %r15
  movq %rsp, (%rdi)
  movq %rsi, %rsp
  popq %r15
  popq %r14
  popq %r13
  popq %r12
  popq %rbx
  popq %rbp
  ret
.size logitless_model_switch,.-logitless_model_switch
)");
#elif LOGITLESS_OWN_SWITCH
// AAPCS64: x19-x30 and the lower halves of v8-v15 survive a call.
asm(R"(
.text
.globl logitless_model_switch
.hidden logitless_model_switch
.type logitless_model_switch,@function
logitless_model_switch:
  sub sp, sp, #160
  stp x19, x20, [sp, #0]
  stp x21, x22, [sp, #16]
  stp x23, x24, [sp, #32]
  stp x25, x26, [sp, #48]
  stp x27, x28, [sp, #64]
  stp x29, x30, [sp, #80]
  stp d8, d9, [sp, #96]
  stp d10, d11, [sp, #112]
  stp d12, d13, [sp, #128]
  stp d14, d15, [sp, #144]
  mov x2, sp
  str x2, [x0]
  mov sp, x1
  ldp x19, x20, [sp, #0]
  ldp x21, x22, [sp, #16]
  ldp x23, x24, [sp, #32]
  ldp x25, x26, [sp, #48]
  ldp x27, x28, [sp, #64]
  ldp x29, x30, [sp, #80]
  ldp d8, d9, [sp, #96]
  ldp d10, d11, [sp, #112]
  ldp d12, d13, [sp, #128]
  ldp d14, d15, [sp, #144]
  add sp, sp, #160
  ret
.size logitless_model_switch,.-logitless_model_switch
)");
#endif

namespace hw::model {
namespace {

constexpr size_t kStackBytes = 256
                               << 10;  // sanitizers make frames large; untouched pages cost nothing
constexpr size_t kGuardBytes = 64 << 10;  // the largest page there is

unsigned char* take_stack(size_t index) {
  static std::vector<unsigned char*> stacks;
  while (stacks.size() <= index) {
    void* p = mmap(nullptr, kStackBytes + kGuardBytes, PROT_READ | PROT_WRITE,
                   MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE, -1, 0);
    if (p == MAP_FAILED || mprotect(p, kGuardBytes, PROT_NONE) != 0) {
      std::perror("device model: cannot map a stack");
      std::abort();
    }
    stacks.push_back(static_cast<unsigned char*>(p) + kGuardBytes);
  }
  return stacks[index];
}

#if LOGITLESS_OWN_SWITCH
/// The frame that the switch pops when it enters a context for the first time.
void* first_frame(unsigned char* stack, void (*entry)()) {
  auto* top = reinterpret_cast<uintptr_t*>(stack + kStackBytes);
#if defined(__x86_64__)
  *--top = 0;  // entry must find the stack pointer at 16 n + 8
  *--top = reinterpret_cast<uintptr_t>(entry);
  for (int i = 0; i < 6; ++i) *--top = 0;
#else
  top -= 160 / sizeof(uintptr_t);
  for (size_t i = 0; i < 160 / sizeof(uintptr_t); ++i) top[i] = 0;
  top[11] = reinterpret_cast<uintptr_t>(entry);  // x30: where the switch returns to
#endif
  return top;
}
#else
ucontext_t& ucontext_of(Context& context) {
  if (context.saved == nullptr) context.saved = new ucontext_t;  // kept with the stacks
  return *static_cast<ucontext_t*>(context.saved);
}
#endif

}  // namespace

void prepare(Context& context, size_t index, void (*entry)()) {
  unsigned char* stack = take_stack(index);
  context.stack = stack;
  context.stack_bytes = kStackBytes;
#if defined(__SANITIZE_ADDRESS__)
  // The frames of a run that ended in a fault were never left.
  ASAN_UNPOISON_MEMORY_REGION(stack, kStackBytes);
#endif
#if LOGITLESS_OWN_SWITCH
  context.saved = first_frame(stack, entry);
#else
  ucontext_t& u = ucontext_of(context);
  getcontext(&u);
  u.uc_stack.ss_sp = stack;
  u.uc_stack.ss_size = kStackBytes;
  u.uc_link = nullptr;
  makecontext(&u, entry, 0);
#endif
}

#if defined(__SANITIZE_ADDRESS__)
namespace {

Context* left = nullptr;  // by the switch under way

/// Tells the sanitizer that the switch is over, and learns where the other stack lies.
void arrive(void* fake) { __sanitizer_finish_switch_fiber(fake, &left->stack, &left->stack_bytes); }

}  // namespace
void entered() { arrive(nullptr); }
#else
void entered() {}
#endif

void switch_context(Context& from, Context& to) {
#if defined(__SANITIZE_ADDRESS__)
  void* fake = nullptr;
  left = &from;
  __sanitizer_start_switch_fiber(&fake, to.stack, to.stack_bytes);
#endif
#if LOGITLESS_OWN_SWITCH
  logitless_model_switch(&from.saved, to.saved);
#else
  swapcontext(&ucontext_of(from), &ucontext_of(to));
#endif
#if defined(__SANITIZE_ADDRESS__)
  arrive(fake);
#endif
}

}  // namespace hw::model
