// Runs a grid: blocks one after another, the threads of a block as fibers. Compiled without sanitizers,
// which would take its bookkeeping for the threads' own memory accesses.
#include "emulator.h"

#include <dlfcn.h>
#include <link.h>

#include <exception>
#include <memory>
#include <mutex>
#include <numeric>
#include <random>
#include <set>
#include <sstream>
#include <string>
#include <tuple>

#include "counters.h"
#include "fiber.h"

uint3 threadIdx, blockIdx;
dim3 blockDim, gridDim;

namespace memkern_emulated {
namespace {

constexpr int kMaxThreads = 1024;
constexpr size_t kMaxDynamicShared = 99 << 10;  // what every GPU from compute capability 8.0 on has for a block
constexpr int64_t kMaxGrid = (int64_t{1} << 31) - 1;

struct Thread : Fiber {
  At at;
  unsigned mask;
  int source;
  uint64_t value;  // given to what it waits for, then what it gets back
};

struct Cancelled {};  // unwinds the threads that are suspended when another has failed

std::mutex one_launch_at_a_time;
Fiber scheduler;
std::vector<Thread> threads(kMaxThreads);
int current;  // the running thread
const std::function<void()>* thread_function;
std::exception_ptr failure;  // of a thread
bool cancelled;

std::string kernel_name;
std::map<uintptr_t, std::string> names;
std::unique_ptr<void, void (*)(void*)> dynamic_memory(nullptr, free);
size_t dynamic_bytes;
void* static_memory;  // the __shared__ arrays of all kernels
size_t static_bytes;

std::mt19937_64 random_order;
bool in_order = false;

template <class... Parts>
[[noreturn]] void fail(const Parts&... parts) {
  std::ostringstream message;
  message << "emulator: " << kernel_name << ", block " << blockIdx.x << ": ";
  (message << ... << parts);
  throw std::runtime_error(message.str());
}

std::vector<int> order_of(int count) {
  std::vector<int> order(count);
  std::iota(order.begin(), order.end(), 0);
  if (!in_order) std::shuffle(order.begin(), order.end(), random_order);
  return order;
}

// ---- Counting

using Site = std::tuple<const void*, bool>;  // where the access stands in the code; whether it is a store
bool counting = false;
std::vector<Launch> counted;
std::map<std::pair<Site, int>, int> executions;  // of a site by a thread of this block
// The accesses (first byte, one past the last) of one execution of a site by a warp of this block.
std::map<std::tuple<Site, int, int>, std::vector<std::pair<uintptr_t, uintptr_t>>> warp_accesses;

void count_access(const void* site, const void* address, size_t bytes, bool is_store) {
  const Site key{site, is_store};
  const int execution = executions[{key, current}]++;
  const auto first = reinterpret_cast<uintptr_t>(address);
  warp_accesses[{key, execution, current / warpSize}].emplace_back(first, first + bytes);
}

void sum_up_block(Launch& launch) {
  for (auto& [key, ranges] : warp_accesses) {
    Traffic& traffic = std::get<bool>(std::get<Site>(key)) ? launch.stored : launch.loaded;
    std::sort(ranges.begin(), ranges.end());
    std::set<uintptr_t> sectors;
    uintptr_t distinct = 0, covered = 0;
    for (const auto& [first, end] : ranges) {
      traffic.bytes += end - first;
      distinct += std::max(end, covered) - std::max(first, covered);
      covered = std::max(end, covered);
      sectors.insert(first / 32);  // aligned to its size, an access never leaves its sector
    }
    traffic.warp_accesses += 1;
    traffic.sectors += sectors.size();
    traffic.sectors_needed += (distinct + 31) / 32;
  }
  warp_accesses.clear();
  executions.clear();
}

// ---- Shared memory

// The thread-local memory of this library in this OS thread.
void find_static_memory() {
  thread_local char touched_to_allocate_it;
  *const_cast<volatile char*>(&touched_to_allocate_it) = 0;
  Dl_info here;
  dladdr(&scheduler, &here);
  dl_iterate_phdr(
      [](dl_phdr_info* library, size_t, void* base) {
        if (reinterpret_cast<void*>(library->dlpi_addr) != base) return 0;
        static_memory = library->dlpi_tls_data;
        for (int i = 0; i < library->dlpi_phnum; ++i)
          if (library->dlpi_phdr[i].p_type == PT_TLS) static_bytes = library->dlpi_phdr[i].p_memsz;
        return 1;
      },
      here.dli_fbase);
}

void allocate_dynamic_memory(size_t bytes) {
  void* memory = nullptr;
  if (bytes > 0 && posix_memalign(&memory, 16, bytes) != 0) throw std::bad_alloc();
  dynamic_memory.reset(memory);
  dynamic_bytes = bytes;
}

bool is_shared(const void* address) {
  const auto within = [&](const void* memory, size_t bytes) {
    return reinterpret_cast<uintptr_t>(address) - reinterpret_cast<uintptr_t>(memory) < bytes;
  };
  return within(static_memory, static_bytes) || within(dynamic_memory.get(), dynamic_bytes);
}

// ---- Threads

// What every fiber runs: the current thread of one block after another.
void thread_loop() {
  threads[current].arrive(scheduler);
  for (;;) {
    Thread& self = threads[current];
    try {
      (*thread_function)();
    } catch (const Cancelled&) {
    } catch (...) {
      failure = std::current_exception();
    }
    self.at = At::end;
    self.go_to(scheduler);
  }
}

void resume(int number) {
  current = number;
  threadIdx.x = number;
  scheduler.go_to(threads[number]);
}

void cancel_suspended(int count) {
  cancelled = true;
  for (int t = 0; t < count; ++t)
    if (threads[t].at != At::start && threads[t].at != At::end) resume(t);
  cancelled = false;
}

// Does work of the scheduler's in the middle of a thread; TSan is to take it for the scheduler's.
template <class Work>
void as_scheduler(Work work) {
  if (__tsan_switch_to_fiber) __tsan_switch_to_fiber(scheduler.tsan, kNoSynchronisation);
  work();
  if (__tsan_switch_to_fiber) __tsan_switch_to_fiber(threads[current].tsan, kNoSynchronisation);
}

// Tells TSan that all these fibers have done comes before all that they do next.
void order_memory(const std::vector<Fiber*>& fibers) {
  if (!__tsan_switch_to_fiber) return;
  for (const auto act : {__tsan_release, __tsan_acquire})
    for (const Fiber* fiber : fibers) {
      __tsan_switch_to_fiber(fiber->tsan, kNoSynchronisation);
      act(fibers.front());
    }
  __tsan_switch_to_fiber(scheduler.tsan, kNoSynchronisation);
}

std::vector<Fiber*> all_threads(int count) {
  std::vector<Fiber*> fibers;
  for (int t = 0; t < count; ++t) fibers.push_back(&threads[t]);
  return fibers;
}

// ---- Warp operations

bool at_warp_operation(const Thread& thread) {
  return thread.at == At::warp_barrier || thread.at == At::shuffle || thread.at == At::vote;
}

// All lanes of the mask have come to the same operation: does it, and lets them go on.
void complete(Thread* warp, At at, unsigned mask) {
  uint64_t values[warpSize];
  unsigned ballot = 0;
  std::vector<Fiber*> lanes;
  for (int lane = 0; lane < warpSize; ++lane)
    if (mask >> lane & 1) {
      values[lane] = warp[lane].value;
      ballot |= (values[lane] != 0) << lane;
      lanes.push_back(&warp[lane]);
    }
  if (at == At::warp_barrier) order_memory(lanes);
  for (Fiber* fiber : lanes) {
    Thread& thread = static_cast<Thread&>(*fiber);
    if (at == At::shuffle && !(mask >> thread.source & 1))
      fail("thread ", &thread - threads.data(), " reads lane ", thread.source,
           " in a shuffle whose mask leaves that lane out");
    thread.value = at == At::shuffle ? values[thread.source] : ballot;
    thread.at = At::released;
  }
}

bool release_warp(Thread* warp, int lanes) {
  bool any = false;
  for (int lane = 0; lane < lanes; ++lane) {
    const At at = warp[lane].at;
    const unsigned mask = warp[lane].mask;
    if (!at_warp_operation(warp[lane])) continue;
    unsigned present = 0;
    for (int other = 0; other < lanes; ++other)
      present |= unsigned(warp[other].at == at && warp[other].mask == mask) << other;
    if (present != mask) continue;
    complete(warp, at, mask);
    any = true;
  }
  return any;
}

// ---- Blocks

std::string where_threads_are(int count) {
  static const char* const names[] = {"have not begun", "can go on", "wait at a block barrier", "wait at __syncwarp",
                                      "wait at a shuffle", "wait at a vote", "have finished"};
  const auto alike = [](const Thread& a, const Thread& b) {
    return a.at == b.at && (a.mask == b.mask || !at_warp_operation(a));
  };
  std::ostringstream text;
  for (int first = 0, t = 1; t <= count; ++t) {
    if (t < count && alike(threads[t], threads[first])) continue;
    text << (first ? ", threads " : "threads ") << first << "-" << t - 1 << " " << names[static_cast<int>(threads[first].at)];
    if (at_warp_operation(threads[first])) text << " (mask " << std::hex << threads[first].mask << std::dec << ")";
    first = t;
  }
  return text.str();
}

bool all_at(At at, int count) {
  return std::all_of(threads.begin(), threads.begin() + count, [&](const Thread& thread) { return thread.at == at; });
}

// Runs the threads of a warp until each has returned or waits for other warps.
void run_warp(int first, const std::vector<int>& lanes) {
  do {
    for (const int lane : lanes) {
      if (threads[first + lane].at > At::released) continue;
      resume(first + lane);
      if (failure) std::rethrow_exception(std::exchange(failure, nullptr));
    }
  } while (release_warp(&threads[first], lanes.size()));
}

void run_block(int count) {
  for (int t = 0; t < count; ++t) threads[t].at = At::start;
  const int warps = (count + warpSize - 1) / warpSize;
  const std::vector<int> full = order_of(warpSize), last = order_of(count - (warps - 1) * warpSize);
  for (;;) {
    for (const int warp : order_of(warps)) run_warp(warp * warpSize, warp == warps - 1 ? last : full);
    if (all_at(At::end, count)) return;
    if (!all_at(At::block_barrier, count))
      fail("deadlock: a block barrier needs every thread of the block, a warp operation every lane of its mask, but ",
           where_threads_are(count));
    order_memory(all_threads(count));
    uint64_t total = 0;
    for (int t = 0; t < count; ++t) total += threads[t].value;
    for (int t = 0; t < count; ++t) {
      threads[t].value = total;
      threads[t].at = At::released;
    }
  }
}

// The kernel's name with its template arguments, where bindings.cpp was told the names.
std::string name_of(const void* kernel) {
  Dl_info here;
  dladdr(kernel, &here);
  const auto found = names.find(static_cast<const char*>(kernel) - static_cast<const char*>(here.dli_fbase));
  return found == names.end() ? "a kernel" : found->second;
}

}  // namespace

// ---- What emulator.h declares

void run(const void* kernel, int64_t grid, int block, size_t shared_bytes, const std::function<void()>& thread) {
  const std::lock_guard<std::mutex> lock(one_launch_at_a_time);
  kernel_name = name_of(kernel);
  blockIdx = {0, 0, 0};
  if (grid < 1 || grid > kMaxGrid || block < 1 || block > kMaxThreads || shared_bytes > kMaxDynamicShared)
    fail("no GPU launches ", grid, " blocks of ", block, " threads with ", shared_bytes,
         " bytes of dynamic shared memory");
  gridDim = dim3(static_cast<unsigned>(grid));
  blockDim = dim3(block);
  thread_function = &thread;
  if (__tsan_get_current_fiber) scheduler.tsan = __tsan_get_current_fiber();
  std::vector<Fiber*> everyone = all_threads(block);
  everyone.push_back(&scheduler);
  for (int t = 0; t < block; ++t)
    if (!threads[t].stack) threads[t].create(t, thread_loop);
  find_static_memory();
  allocate_dynamic_memory(shared_bytes);
  Launch launch{kernel_name, grid, block, shared_bytes, {}, {}};
  try {
    for (const int index : order_of(static_cast<int>(grid))) {
      blockIdx.x = index;
      poison(static_memory, static_bytes);
      poison(dynamic_memory.get(), dynamic_bytes);
      order_memory(everyone);
      run_block(block);
      order_memory(everyone);
      if (counting) sum_up_block(launch);
    }
  } catch (...) {
    cancel_suspended(block);
    order_memory(everyone);
    warp_accesses.clear();
    executions.clear();
    throw;
  }
  if (counting) counted.push_back(std::move(launch));
}

uint64_t wait(At at, unsigned mask, uint64_t value, int source) {
  Thread& self = threads[current];
  const int lane = current % warpSize;
  if (at != At::block_barrier && !(mask >> lane & 1))
    fail("thread ", current, " is at a warp operation whose mask leaves it out");
  self.at = at;
  self.mask = mask;
  self.value = value;
  self.source = source;
  self.go_to(scheduler);
  if (cancelled) throw Cancelled();
  return self.value;
}

__attribute__((noinline)) void accessed(const void* address, size_t bytes, bool is_store) {
  if (bytes > 16 || reinterpret_cast<uintptr_t>(address) % bytes != 0)
    fail("thread ", current, is_store ? " stores " : " loads ", bytes, " bytes at ", address,
         ": needs at most 16, at a multiple of their number");
  if (!counting || is_shared(address)) return;
  const void* site = __builtin_return_address(0);
  as_scheduler([&] { count_access(site, address, bytes, is_store); });
}

void poison(void* memory, size_t bytes) {
  if (bytes > 0) memset(memory, 0xFF, bytes);
}

void* dynamic_shared() { return dynamic_memory.get(); }

// ---- What counters.h declares

void count(bool on) {
  counting = on;
  if (on) counted.clear();
}

std::vector<Launch> launches() { return counted; }

void set_order(uint64_t seed) {
  in_order = seed == 0;
  random_order.seed(seed);
}

void name_kernels(std::map<uintptr_t, std::string> given) { names = std::move(given); }

}  // namespace memkern_emulated
