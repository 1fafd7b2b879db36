// Fibers: a stack each, and a switch between them that the sanitizers are told of. Their functions are
// weak, so that this file is the same with and without them.
#pragma once

#include <sys/mman.h>

#include <cstddef>
#include <cstdint>
#include <new>
#include <string>

extern "C" {
void __sanitizer_start_switch_fiber(void** fake_stack, const void* stack, size_t bytes) __attribute__((weak));
void __sanitizer_finish_switch_fiber(void* fake_stack, const void** stack, size_t* bytes) __attribute__((weak));
void* __tsan_get_current_fiber() __attribute__((weak));
void* __tsan_create_fiber(unsigned flags) __attribute__((weak));
void __tsan_set_fiber_name(void* fiber, const char* name) __attribute__((weak));
void __tsan_switch_to_fiber(void* fiber, unsigned flags) __attribute__((weak));
void __tsan_acquire(void* token) __attribute__((weak));
void __tsan_release(void* token) __attribute__((weak));
}

#ifdef __x86_64__
// Saves what a function call must preserve on the stack it leaves, and takes it from the one it goes to.
asm(R"(
.text
.local memkern_switch_stack
.type memkern_switch_stack, @function
memkern_switch_stack:
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
)");
extern "C" void memkern_switch_stack(void** left_at, void* go_to);

// A stack on which the first switch enters `entry`: six registers, its address, no caller.
inline void* prepared_stack(char* stack, size_t bytes, void (*entry)()) {
  auto* top = reinterpret_cast<uintptr_t*>(stack + bytes);
  *--top = 0;
  *--top = reinterpret_cast<uintptr_t>(entry);
  return top - 6;
}
#else
// Slower: it also saves the signal mask, by a system call.
#include <ucontext.h>
inline void memkern_switch_stack(void** left_at, void* go_to) {
  ucontext_t here;
  *left_at = &here;
  swapcontext(&here, static_cast<ucontext_t*>(go_to));
}

inline void* prepared_stack(char* stack, size_t bytes, void (*entry)()) {
  auto* context = new (stack) ucontext_t;
  getcontext(context);
  context->uc_stack.ss_sp = stack + sizeof(ucontext_t);
  context->uc_stack.ss_size = bytes - sizeof(ucontext_t);
  makecontext(context, entry, 0);
  return context;
}
#endif

namespace memkern_emulated {

constexpr unsigned kNoSynchronisation = 1;  // TSan: the switch itself orders nothing

struct Fiber {
  const void* stack = nullptr;
  size_t stack_bytes = 0;
  void* left_at = nullptr;
  void* fake_stack = nullptr;  // ASan's
  void* tsan = nullptr;

  // Space is taken from memory as it is touched. Tops of stacks lie at different offsets in their pages,
  // or all would compete for the same few cache lines.
  void create(int number, void (*entry)()) {
    stack_bytes = (256 << 10) - number % 61 * 64;
    stack = mmap(nullptr, 256 << 10, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE, -1, 0);
    if (stack == MAP_FAILED) throw std::bad_alloc();
    left_at = prepared_stack(static_cast<char*>(const_cast<void*>(stack)), stack_bytes, entry);
    if (__tsan_create_fiber) {
      tsan = __tsan_create_fiber(0);
      __tsan_set_fiber_name(tsan, ("CUDA thread " + std::to_string(number)).c_str());
    }
  }

  // To be called first by a fiber that is entered; `previous` is the one it was entered from.
  void arrive(Fiber& previous) {
    if (__sanitizer_finish_switch_fiber)
      __sanitizer_finish_switch_fiber(fake_stack, &previous.stack, &previous.stack_bytes);
  }

  void go_to(Fiber& other) {
    if (__sanitizer_start_switch_fiber) __sanitizer_start_switch_fiber(&fake_stack, other.stack, other.stack_bytes);
    if (__tsan_switch_to_fiber) __tsan_switch_to_fiber(other.tsan, kNoSynchronisation);
    memkern_switch_stack(&left_at, other.left_at);
    arrive(other);
  }
};

}  // namespace memkern_emulated
