// The optimizer ops on CUDA; the formulas are in ../optim.h, the cutting into blocks in multi_tensor.cuh.
#include "../optim_ops.h"
#include "multi_tensor.cuh"

namespace memkern {
namespace optim {
namespace {

// ---- check_and_norm: every gradient is read once, in accesses of 16 bytes

constexpr int kCheckVectors = 4096;

template <class T>
using GradCut = Cut<kWidest<T>, kCheckVectors>;

// Calls body(type tag) for the CUDA storage type.
#pragma nv_exec_check_disable
template <class Body>
MK_HD void for_type(Type type, Body body) {
  switch (type) {
    case kHalf: return body(__half{});
    case kBFloat16: return body(__nv_bfloat16{});
    case kFloat: return body(float{});
    case kDouble: return body(double{});
  }
}

struct Gradient {
  const void* data;
  int64_t n;
  int head;
  Type type;

  unsigned chunks() const {
    unsigned count = 0;
    for_type(type, [&](auto tag) { count = GradCut<decltype(tag)>{n, head}.chunks(); });
    return count;
  }
};

struct CheckShared {
  const float* grad_scale;
  double* sums;  // of each chunk; NaN where a value was not finite
};

template <class T>
__device__ double square_sum(const Gradient& grad, unsigned chunk, float unscale) {
  acc_t<T> sums[kWidest<T>] = {};
  bool finite = true;
  GradCut<T>{grad.n, grad.head}.for_each(chunk, [&](auto count, int64_t i) {
    constexpr int N = decltype(count)::value;
    acc_t<T> x[N];
    unpack(load<T, N>(static_cast<const T*>(grad.data) + i), x);
#pragma unroll
    for (int k = 0; k < N; ++k) {
      x[k] *= unscale;
      sums[k] += x[k] * x[k];
      finite = finite && x[k] - x[k] == 0;
    }
  });
  double sum = 0;
#pragma unroll
  for (int k = 0; k < kWidest<T>; ++k) sum += sums[k];
  return finite ? sum : NAN;
}

__global__ void __launch_bounds__(kChunkThreads) check_kernel(const __grid_constant__ Batch<Gradient, CheckShared> batch) {
  const int i = batch.item_of(blockIdx.x);
  const unsigned chunk = blockIdx.x - batch.first_chunk(i);
  const float unscale = inverse(batch.shared.grad_scale);
  double sum = 0;
  for_type(batch.item[i].type, [&](auto tag) { sum = square_sum<decltype(tag)>(batch.item[i], chunk, unscale); });
  sum = block_sum(sum);
  if (threadIdx.x == 0) store<double, 1>(batch.shared.sums + blockIdx.x, {sum});
}

constexpr int kFinishThreads = 1024;

__global__ void __launch_bounds__(kFinishThreads)
    finish_check_kernel(const double* sums, int64_t count, const float* grad_scale, double max_norm, float* out) {
  double sum = 0;
  for (int64_t i = threadIdx.x; i < count; i += kFinishThreads) sum += load<double, 1>(sums + i).value[0];
  sum = block_sum(sum);
  if (threadIdx.x != 0) return;
  const float unscale = inverse(grad_scale), norm = static_cast<float>(sqrt(sum));
  const bool found = sum != sum || !usable(unscale);
  store<float, 1>(out, {found ? 1.0f : 0.0f});
  store<float, 1>(out + 1, {norm});
  store<float, 1>(out + 2, {clip_factor(max_norm, norm)});
}

Tensor check_and_norm(const Tensors& grads, const Maybe& grad_scale, double max_norm) {
  const OnDeviceOf device(grads[0]);
  std::vector<Gradient> items;
  Tensors kept;  // dense copies of gradients with gaps
  int64_t chunks = 0;
  for (const Tensor& grad : grads) {
    STD_TORCH_CHECK(grad.get_device_index() == grads[0].get_device_index(), "grads: needs all on one device");
    const Type type = type_of(grad, "grads");
    if (grad.numel() == 0) continue;
    kept.push_back(dense(grad));
    const void* data = kept.back().const_data_ptr();
    const int size = static_cast<int>(grad.element_size());
    const int head = static_cast<int>(std::min<int64_t>(head_of(data, size, 16 / size), grad.numel()));
    items.push_back({data, grad.numel(), head, type});
    chunks += items.back().chunks();
  }
  const float* scale = fp32_number(grad_scale, "grad_scale", grads[0]);
  const Tensor sums = fresh(grads[0], {chunks}, ScalarType::Double), result = fresh(grads[0], {3}, ScalarType::Float);
  auto* sum = static_cast<double*>(sums.mutable_data_ptr());
  in_batches(CheckShared{scale, sum}, items, [&](auto& batch, int64_t, int64_t first_chunk, int64_t count) {
    batch.shared.sums = sum + first_chunk;
    launch(check_kernel, count, kChunkThreads, 0, device.stream, batch);
  });
  launch(finish_check_kernel, 1, kFinishThreads, 0, device.stream, sum, chunks, scale, max_norm,
         static_cast<float*>(result.mutable_data_ptr()));
  return result;
}

// ---- advance

struct Counters {
  static constexpr int kMost = (kArgumentBytes - 32) / sizeof(float*);
  const float* found_inf;
  int64_t* skipped;
  int count;
  float* step[kMost];
};

__global__ void __launch_bounds__(kChunkThreads) advance_kernel(const __grid_constant__ Counters counters) {
  const int i = blockIdx.x * kChunkThreads + threadIdx.x;
  const bool skip = counters.found_inf != nullptr && !(*counters.found_inf == 0);
  if (skip && i == 0 && counters.skipped) *counters.skipped += 1;
  if (!skip && i < counters.count) *counters.step[i] += 1;
}

void advance(const Tensors& steps, const Maybe& skipped, const Maybe& found_inf) {
  const Advance all = advance_of(steps, skipped, found_inf);
  if (all.steps.empty() && !all.skipped) return;
  const OnDeviceOf device(steps.empty() ? *skipped : steps[0]);
  Counters counters{};
  counters.found_inf = all.found_inf;
  counters.skipped = all.skipped;
  size_t first = 0;
  do {
    counters.count = static_cast<int>(std::min<size_t>(steps.size() - first, Counters::kMost));
    std::copy_n(all.steps.begin() + first, counters.count, counters.step);
    launch(advance_kernel, counters.count / kChunkThreads + 1, kChunkThreads, 0, device.stream, counters);
    counters.skipped = nullptr;  // counted once
    first += counters.count;
  } while (first < steps.size());
}

// ---- The steps: four elements at a time, which is 16 bytes of fp32 and 8 of the 16-bit types

constexpr int kStepWidth = 4;
using StepCut = Cut<kStepWidth, 2048>;

struct Item : Row {
  __host__ __device__ StepCut cut() const { return {n, head}; }
  unsigned chunks() const { return cut().chunks(); }
};

template <class Algorithm>
struct StepShared {
  Algorithm algorithm;
  OnDevice numbers;
  double* sums;          // LAMB: of the squares of weight and direction, for each chunk
  const double* ratios;  // LAMB: a factor for the learning rate of each item
};

template <class Algorithm>
using StepBatch = Batch<Item, StepShared<Algorithm>>;

// N elements of a list as they come from memory, not yet converted: converting waits for the load.
template <int N>
__device__ __forceinline__ Pack<float, N> fetch(const Item& item, int list, int64_t i, float) {
  if (item.type[list] == kFloat) return load<float, N>(static_cast<const float*>(item.data[list]) + i);
  const auto narrow = load<uint16_t, N>(static_cast<const uint16_t*>(item.data[list]) + i);
  Pack<float, N> raw;
  memcpy(&raw, &narrow, sizeof narrow);
  return raw;
}
template <int N>
__device__ __forceinline__ void convert(const Pack<float, N>& raw, Type type, float (&x)[N]) {
  if (type == kFloat) {
    unpack(raw, x);
  } else if (type == kHalf) {
    Pack<__half, N> narrow;
    memcpy(&narrow, &raw, sizeof narrow);
    unpack(narrow, x);
  } else {
    Pack<__nv_bfloat16, N> narrow;
    memcpy(&narrow, &raw, sizeof narrow);
    unpack(narrow, x);
  }
}

// With fp64 among the lists elements come one at a time: speed is no matter there.
template <int N>
__device__ __forceinline__ Pack<double, N> fetch(const Item& item, int list, int64_t i, double) {
  Pack<double, N> values;
  for_type(item.type[list], [&](auto tag) {
    using T = decltype(tag);
    for (int k = 0; k < N; ++k) values.value[k] = widen(load<T, 1>(static_cast<const T*>(item.data[list]) + i + k).value[0]);
  });
  return values;
}
template <int N>
__device__ __forceinline__ void convert(const Pack<double, N>& raw, Type, double (&x)[N]) {
  unpack(raw, x);
}

template <int N, class A>
__device__ __forceinline__ void put(const Item& item, int list, int64_t i, const A (&x)[N]) {
  for_type(item.type[list], [&](auto tag) {
    using T = decltype(tag);
    if constexpr (std::is_same_v<acc_t<T>, A>) {
      store(static_cast<T*>(item.data[list]) + i, pack<T, N>(x));
    } else if constexpr (std::is_same_v<A, double>) {
      for (int k = 0; k < N; ++k) store(static_cast<T*>(item.data[list]) + i + k, pack<T, 1>({static_cast<float>(x[k])}));
    }
  });
}

// What a block's elements share, made by its first thread.
template <class Algorithm, class A>
struct BlockNumbers {
  typename Algorithm::template Scalars<A> scalars;
  A unscale, along;
};

template <class Algorithm, class A>
__device__ BlockNumbers<Algorithm, A> numbers_of(const StepBatch<Algorithm>& batch, int i) {
  __shared__ BlockNumbers<Algorithm, A> shared;
  if (threadIdx.x == 0) {
    const OnDevice& numbers = batch.shared.numbers;
    const double ratio = batch.shared.ratios ? batch.shared.ratios[i] : 1.0;
    const double t = batch.item[i].step ? *batch.item[i].step : 0.0;
    shared = {batch.shared.algorithm.template scalars<A>(numbers.learning_rate() * ratio, t), A(numbers.unscale()),
              A(numbers.along())};
  }
  __syncthreads();
  return shared;
}

// N elements of a parameter's lists, loaded together.
template <class Algorithm, class A, int N>
struct Elements {
  A w[N], g[N], state[3][N];

  __device__ __forceinline__ Elements(const Item& item, int64_t i) {
    constexpr int states = Algorithm::kStates;
    Pack<A, N> raw[2 + states];
    raw[0] = fetch<N>(item, kWeight, i, A());
    raw[1] = fetch<N>(item, kGrad, i, A());
#pragma unroll
    for (int k = 0; k < states; ++k) raw[2 + k] = fetch<N>(item, kState + k, i, A());
    convert(raw[0], item.type[kWeight], w);
    convert(raw[1], item.type[kGrad], g);
#pragma unroll
    for (int k = 0; k < states; ++k) convert(raw[2 + k], item.type[kState + k], state[k]);
  }
};

template <class Algorithm, class A>
__global__ void __launch_bounds__(kChunkThreads, 2) step_kernel(const __grid_constant__ StepBatch<Algorithm> batch) {
  if (batch.shared.numbers.skip()) return;
  const int number = batch.item_of(blockIdx.x);
  const Item& item = batch.item[number];
  const BlockNumbers<Algorithm, A> b = numbers_of<Algorithm, A>(batch, number);
  item.cut().for_each(blockIdx.x - batch.first_chunk(number), [&](auto count, int64_t i) {
    constexpr int N = decltype(count)::value, states = Algorithm::kStates;
    Elements<Algorithm, A, N> e(item, i);
#pragma unroll
    for (int k = 0; k < N; ++k) {
      e.g[k] *= b.unscale;
      A state[3];
#pragma unroll
      for (int s = 0; s < states; ++s) state[s] = e.state[s][k];
      Algorithm::update(b.scalars, e.w[k], e.g[k] * b.along, state);
#pragma unroll
      for (int s = 0; s < states; ++s) e.state[s][k] = state[s];
    }
    put(item, kWeight, i, e.w);
#pragma unroll
    for (int s = 0; s < states; ++s) put(item, kState + s, i, e.state[s]);
    if (item.data[kCopy]) put(item, kCopy, i, e.w);
    if (batch.shared.numbers.write_grads) put(item, kGrad, i, e.g);
  });
}

// Reads all that a step of LAMB reads, for the norms of weight and direction.
template <class A>
__global__ void __launch_bounds__(kChunkThreads) lamb_norm_kernel(const __grid_constant__ StepBatch<Lamb> batch) {
  if (batch.shared.numbers.skip()) return;
  const int number = batch.item_of(blockIdx.x);
  const Item& item = batch.item[number];
  const BlockNumbers<Lamb, A> b = numbers_of<Lamb, A>(batch, number);
  A weight = 0, direction = 0;
  item.cut().for_each(blockIdx.x - batch.first_chunk(number), [&](auto count, int64_t i) {
    constexpr int N = decltype(count)::value;
    const Elements<Lamb, A, N> e(item, i);
#pragma unroll
    for (int k = 0; k < N; ++k) {
      A state[] = {e.state[0][k], e.state[1][k]};
      const A u = Lamb::direction(b.scalars, e.w[k], e.g[k] * b.unscale * b.along, state);
      weight += e.w[k] * e.w[k];
      direction += u * u;
    }
  });
  const double w = block_sum(weight), u = block_sum(direction);
  if (threadIdx.x == 0) store<double, 2>(batch.shared.sums + 2 * int64_t(blockIdx.x), {w, u});
}

// A block an item.
__global__ void __launch_bounds__(kChunkThreads) lamb_ratio_kernel(const __grid_constant__ StepBatch<Lamb> batch) {
  if (batch.shared.numbers.skip()) return;
  const int i = blockIdx.x;
  double weight = 0, direction = 0;
  for (unsigned chunk = batch.first_chunk(i) + threadIdx.x; chunk < batch.end[i]; chunk += kChunkThreads) {
    const Pack<double, 2> sums = load<double, 2>(batch.shared.sums + 2 * int64_t(chunk));
    weight += sums.value[0];
    direction += sums.value[1];
  }
  weight = block_sum(weight);
  direction = block_sum(direction);
  if (threadIdx.x == 0) store<double, 1>(const_cast<double*>(batch.shared.ratios) + i, {Lamb::ratio(weight, direction)});
}

// The items that have fp64 among their lists, or the others.
std::vector<Item> items_of(const std::vector<Row>& rows, bool in_double) {
  std::vector<Item> items;
  for (const Row& row : rows) {
    const auto is_double = [](Type type) { return type == kDouble; };
    if (std::any_of(std::begin(row.type), std::end(row.type), is_double) != in_double) continue;
    const auto head = [&](int list) { return head_of(row.data[list], row.type[list] == kFloat ? 4 : 2, kStepWidth); };
    int common = in_double ? -1 : head(kWeight);
    for (int list = 0; list < kLists; ++list)
      if (row.data[list] && head(list) != common) common = -1;
    items.push_back({row});
    items.back().head = static_cast<int8_t>(std::min<int64_t>(common, row.n));
  }
  return items;
}

template <class Algorithm, class A>
void run_on(const Algorithm& algorithm, const OnDevice& numbers, const std::vector<Item>& items, const Tensor& like) {
  const OnDeviceOf device(like);
  in_batches(StepShared<Algorithm>{algorithm, numbers, nullptr, nullptr}, items,
             [&](auto& batch, int64_t, int64_t, int64_t chunks) {
               Tensor sums, ratios;
               if constexpr (std::is_same_v<Algorithm, Lamb>) {
                 sums = fresh(like, {2 * chunks}, ScalarType::Double);
                 ratios = fresh(like, {batch.count}, ScalarType::Double);
                 batch.shared.sums = static_cast<double*>(sums.mutable_data_ptr());
                 batch.shared.ratios = nullptr;
                 launch(lamb_norm_kernel<A>, chunks, kChunkThreads, 0, device.stream, batch);
                 batch.shared.ratios = static_cast<const double*>(ratios.const_data_ptr());
                 launch(lamb_ratio_kernel, batch.count, kChunkThreads, 0, device.stream, batch);
               }
               launch(step_kernel<Algorithm, A>, chunks, kChunkThreads, 0, device.stream, batch);
             });
}

struct Runner {
  template <class Algorithm>
  static void run(const Algorithm& algorithm, const OnDevice& numbers, const std::vector<Row>& rows, const Tensor& like) {
    run_on<Algorithm, float>(algorithm, numbers, items_of(rows, false), like);
    run_on<Algorithm, double>(algorithm, numbers, items_of(rows, true), like);
  }
};

}  // namespace
}  // namespace optim
}  // namespace memkern

STABLE_TORCH_LIBRARY_IMPL(MEMKERN_CUDA_NAMESPACE, MEMKERN_CUDA_KEY, m) {
  using namespace memkern::optim;
  m.impl("check_and_norm", TORCH_BOX(&check_and_norm));
  m.impl("advance", TORCH_BOX(&advance));
  m.impl("adamw_step", TORCH_BOX(&adamw_step<Runner>));
  m.impl("sgd_step", TORCH_BOX(&sgd_step<Runner>));
  m.impl("lamb_step", TORCH_BOX(&lamb_step<Runner>));
  m.impl("lion_step", TORCH_BOX(&lion_step<Runner>));
}
