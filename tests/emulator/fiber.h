// Fibers on x86-64: a stack each, and a switch between them that the sanitizers are told of. (swapcontext
// would do, at a system call a switch: 10 times slower.) The sanitizers' functions are weak, so that this
// file is the same with and without them.
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

namespace memkern_emulated {

constexpr unsigned kNoSynchronisation = 1;  // TSan: the switch itself orders nothing

struct Fiber {
  const void* stack = nullptr;
  size_t stack_bytes = 0;
  void* left_at = nullptr;
  void* fake_stack = nullptr;  // ASan's
  void* tsan = nullptr;

  // Memory is taken as it is touched. The tops of stacks lie at different offsets in their pages, or all
  // would compete for the same few cache lines.
  void create(int number, void (*entry)()) {
    constexpr size_t kBytes = 256 << 10;
    void* memory = mmap(nullptr, kBytes, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE, -1, 0);
    if (memory == MAP_FAILED) throw std::bad_alloc();
    stack = memory;
    stack_bytes = kBytes - number % 61 * 64;
    // What the first switch to it finds: six registers, the entry's address, and no caller to return to.
    auto* top = reinterpret_cast<uintptr_t*>(static_cast<char*>(memory) + stack_bytes);
    *--top = 0;
    *--top = reinterpret_cast<uintptr_t>(entry);
    left_at = top - 6;
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
