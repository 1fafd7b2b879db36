// The optimizer ops on the CPU. Work is cut into chunks over all tensors together, which the threads share;
// a chunk's tensors are converted to the type that is computed in, a block at a time, in the first-level cache.

// As PyTorch rounds: a product is rounded before it is added to, so that results stay within 2 ulp of its own.
#ifdef __clang__
#pragma clang fp contract(off)
#else
#pragma GCC optimize("fp-contract=off")
#endif

#include "../optim_ops.h"

#include "loops.h"

namespace memkern {
namespace optim {
namespace {

constexpr int64_t kChunk = 16384;
constexpr int64_t kBlock = 4096;
template <class A>
constexpr int64_t kLine = 64 / sizeof(A);  // elements that memory delivers at a time

// Asks for the line that is needed 32 lines on: at each page's end the hardware's own looking ahead ends too.
template <class A>
inline void look_ahead(const A* x) {
  __builtin_prefetch(x + 32 * kLine<A>);
}

struct Chunk {
  int64_t row, begin, end;
};

std::vector<Chunk> chunks_of(const std::vector<Row>& rows) {
  std::vector<Chunk> chunks;
  for (size_t row = 0; row < rows.size(); ++row)
    for (int64_t begin = 0; begin < rows[row].n; begin += kChunk)
      chunks.push_back({static_cast<int64_t>(row), begin, std::min(begin + kChunk, rows[row].n)});
  return chunks;
}

template <class Body>
void for_chunks(const std::vector<Chunk>& chunks, Body body) {
  int64_t elements = 0;
  for (const Chunk& chunk : chunks) elements += chunk.end - chunk.begin;
  // A thread has a whole chunk's elements to do, also where many tensors are tiny.
  const int64_t count = chunks.size(), grain = elements > 0 ? std::max<int64_t>(1, count * kChunk / elements) : 1;
  torch::stable::parallel_for(0, count, grain, [&](int64_t first, int64_t last) {
    for (int64_t i = first; i < last; ++i) body(i);
  });
}

// Calls body(type tag) for the storage type.
template <class Body>
void for_type(Type type, Body body) {
  switch (type) {
    case kHalf: return body(Half{});
    case kBFloat16: return body(BFloat16{});
    case kFloat: return body(float{});
    case kDouble: return body(double{});
  }
}

template <class T, class A>
MEMKERN_CLONES void widen_block(const T* from, A* to, int64_t n) {
  for (int64_t i = 0; i < n; ++i) to[i] = widen(from[i]);
}

template <class A, class T>
MEMKERN_CLONES void narrow_block(const A* from, T* to, int64_t n) {
  for (int64_t i = 0; i < n; ++i) store(to + i, from[i]);
}

// A block of one list as A: where it lies if it is of that type, else a converted copy.
template <class A>
struct Block {
  A* data = nullptr;
  void* original;
  Type type;
  int64_t n;
  A converted[kBlock];

  void open(const Row& row, int list, int64_t begin, int64_t size) {
    type = row.type[list];
    n = size;
    for_type(type, [&](auto tag) {
      using T = decltype(tag);
      T* at = static_cast<T*>(row.data[list]) + begin;
      original = at;
      if constexpr (std::is_same_v<T, A>) {
        data = at;
      } else {
        widen_block(at, converted, n);
        data = converted;
      }
    });
  }
  // Puts a converted copy back, rounded.
  void close() const {
    if (data != converted) return;
    for_type(type, [&](auto tag) {
      using T = decltype(tag);
      narrow_block(data, static_cast<T*>(original), n);
    });
  }
};

template <class A>
MEMKERN_CLONES void multiply_block(A* x, A factor, int64_t n) {
  for (int64_t i = 0; i < n; ++i) x[i] *= factor;
}

template <class Algorithm, class A>
MEMKERN_CLONES void update_block(typename Algorithm::template Scalars<A> s, A unscale, A along, A* __restrict w,
                                 const A* __restrict g, A* __restrict a, A* __restrict b, A* __restrict c, int64_t n) {
  constexpr int states = Algorithm::kStates;
  const auto element = [&](int64_t i) {
    A weight = w[i], state[3];
    if constexpr (states > 0) state[0] = a[i];
    if constexpr (states > 1) state[1] = b[i];
    if constexpr (states > 2) state[2] = c[i];
    Algorithm::update(s, weight, g[i] * unscale * along, state);
    if constexpr (states > 0) a[i] = state[0];
    if constexpr (states > 1) b[i] = state[1];
    if constexpr (states > 2) c[i] = state[2];
    w[i] = weight;
  };
  int64_t i = 0;
  for (; i + kLine<A> <= n; i += kLine<A>) {
    look_ahead(w + i);
    look_ahead(g + i);
    if constexpr (states > 0) look_ahead(a + i);
    if constexpr (states > 1) look_ahead(b + i);
    if constexpr (states > 2) look_ahead(c + i);
    for (int64_t k = 0; k < kLine<A>; ++k) element(i + k);
  }
  for (; i < n; ++i) element(i);
}

template <class A>
MEMKERN_CLONES void direction_block(Lamb::Scalars<A> s, A unscale, A along, const A* __restrict w,
                                    const A* __restrict g, const A* __restrict m, const A* __restrict v,
                                    A* __restrict to, int64_t n) {
  for (int64_t i = 0; i < n; ++i) {
    A state[] = {m[i], v[i]};
    to[i] = Lamb::direction(s, w[i], g[i] * unscale * along, state);
  }
}

// Adds the squares of n elements times a factor to sum, and to infinite a NaN if one of those products is not
// finite. The vectors are of one width, whatever the instruction set, so that a sum is the same on every machine.
template <class A>
MEMKERN_CLONES void square_sum(const A* x, A factor, int64_t n, double& sum, double& infinite) {
  using Vector [[gnu::vector_size(64)]] = A;
  constexpr int64_t lanes = kLine<A>;
  Vector sums[2] = {}, infinites[2] = {};
  int64_t i = 0;
  for (; i + 2 * lanes <= n; i += 2 * lanes)
    for (int k = 0; k < 2; ++k) {
      Vector value;
      look_ahead(x + i + k * lanes);
      memcpy(&value, x + i + k * lanes, sizeof value);
      value *= factor;
      sums[k] += value * value;
      infinites[k] += value * 0;
    }
  for (; i < n; ++i) {
    const A value = x[i] * factor;
    sums[0][0] += value * value;
    infinites[0][0] += value * 0;
  }
  for (int k = 0; k < 2; ++k)
    for (int lane = 0; lane < lanes; ++lane) {
      sum += sums[k][lane];
      infinite += infinites[k][lane];
    }
}

Tensor check_and_norm(const Tensors& grads, const Maybe& grad_scale, double max_norm) {
  std::vector<Row> rows;
  Tensors kept;  // dense copies of gradients with gaps
  for (const Tensor& grad : grads) {
    kept.push_back(dense(grad));
    Row row{};
    row.n = grad.numel();
    row.data[kGrad] = const_cast<void*>(kept.back().const_data_ptr());
    row.type[kGrad] = type_of(grad, "grads");
    if (row.n > 0) rows.push_back(row);
  }
  const float* scale = fp32_number(grad_scale, "grad_scale", grads[0]);
  const float unscale = inverse(scale);
  const std::vector<Chunk> chunks = chunks_of(rows);
  std::vector<double> sums(chunks.size()), infinites(chunks.size());
  for_chunks(chunks, [&](int64_t i) {
    const Row& row = rows[chunks[i].row];
    const auto add = [&](auto tag) {
      using A = decltype(tag);
      for (int64_t begin = chunks[i].begin; begin < chunks[i].end; begin += kBlock) {
        Block<A> grad;
        grad.open(row, kGrad, begin, std::min(kBlock, chunks[i].end - begin));
        square_sum(grad.data, A(unscale), grad.n, sums[i], infinites[i]);
      }
    };
    row.type[kGrad] == kDouble ? add(double{}) : add(float{});
  });
  double sum = 0, infinite = 0;
  for (size_t i = 0; i < chunks.size(); ++i) sum += sums[i], infinite += infinites[i];
  const bool found = infinite != 0 || !usable(unscale);
  Tensor result = fresh(grads[0], {3}, ScalarType::Float);
  float* out = static_cast<float*>(result.mutable_data_ptr());
  out[0] = found ? 1.0f : 0.0f;
  out[1] = static_cast<float>(std::sqrt(sum));
  out[2] = clip_factor(max_norm, out[1]);
  return result;
}

void advance(const Tensors& steps, const Maybe& skipped, const Maybe& found_inf) {
  const Advance all = advance_of(steps, skipped, found_inf);
  if (all.found_inf == nullptr || *all.found_inf == 0) {
    for (float* step : all.steps) *step += 1;
  } else if (all.skipped) {
    *all.skipped += 1;
  }
}

// The blocks of a row's lists, as A.
template <class Algorithm, class A>
struct Blocks {
  Block<A> w, g, state[3];

  Blocks(const Row& row, int64_t begin, int64_t n) {
    w.open(row, kWeight, begin, n);
    g.open(row, kGrad, begin, n);
    for (int k = 0; k < Algorithm::kStates; ++k) state[k].open(row, kState + k, begin, n);
  }
};

// Calls body(A tag, number of the chunk, first element, number of elements) for every block of every chunk.
template <class Body>
void for_blocks(const std::vector<Row>& rows, const std::vector<Chunk>& chunks, Body body) {
  for_chunks(chunks, [&](int64_t i) {
    for (int64_t begin = chunks[i].begin; begin < chunks[i].end; begin += kBlock) {
      const int64_t n = std::min(kBlock, chunks[i].end - begin);
      if (rows[chunks[i].row].type[kWeight] == kDouble)
        body(double{}, i, begin, n);
      else
        body(float{}, i, begin, n);
    }
  });
}

void store_copy(const Row& row, int64_t begin, const float* weight, int64_t n) {
  for_type(row.type[kCopy], [&](auto tag) {
    using T = decltype(tag);
    narrow_block(weight, static_cast<T*>(row.data[kCopy]) + begin, n);
  });
}

// ratios: a factor for the learning rate of each row, or none.
template <class Algorithm>
void update(const Algorithm& algorithm, const OnDevice& numbers, const std::vector<Row>& rows,
            const std::vector<double>& ratios) {
  const std::vector<Chunk> chunks = chunks_of(rows);
  for_blocks(rows, chunks, [&](auto tag, int64_t i, int64_t begin, int64_t n) {
    using A = decltype(tag);
    const Row& row = rows[chunks[i].row];
    const double lr = numbers.learning_rate() * (ratios.empty() ? 1.0 : ratios[chunks[i].row]);
    const auto scalars = algorithm.template scalars<A>(lr, row.step ? *row.step : 0.0);
    A unscale = numbers.unscale();
    Blocks<Algorithm, A> b(row, begin, n);
    if (numbers.write_grads) {
      multiply_block(b.g.data, unscale, n);
      b.g.close();
      unscale = 1;
    }
    update_block<Algorithm, A>(scalars, unscale, numbers.along(), b.w.data, b.g.data, b.state[0].data,
                               b.state[1].data, b.state[2].data, n);
    b.w.close();
    for (int k = 0; k < Algorithm::kStates; ++k) b.state[k].close();
    if constexpr (std::is_same_v<A, float>)
      if (row.data[kCopy]) store_copy(row, begin, b.w.data, n);
  });
}

// For each row, the factor that LAMB has for its learning rate.
std::vector<double> lamb_ratios(const Lamb& algorithm, const OnDevice& numbers, const std::vector<Row>& rows) {
  const std::vector<Chunk> chunks = chunks_of(rows);
  std::vector<double> weight(chunks.size()), direction(chunks.size());
  for_blocks(rows, chunks, [&](auto tag, int64_t i, int64_t begin, int64_t n) {
    using A = decltype(tag);
    const Row& row = rows[chunks[i].row];
    const auto scalars = algorithm.scalars<A>(0, *row.step);
    Blocks<Lamb, A> b(row, begin, n);
    A u[kBlock];
    direction_block<A>(scalars, numbers.unscale(), numbers.along(), b.w.data, b.g.data, b.state[0].data,
                       b.state[1].data, u, n);
    double unused = 0;
    square_sum(b.w.data, A(1), n, weight[i], unused);
    square_sum(u, A(1), n, direction[i], unused);
  });
  std::vector<double> w(rows.size()), u(rows.size()), ratios(rows.size());
  for (size_t i = 0; i < chunks.size(); ++i) w[chunks[i].row] += weight[i], u[chunks[i].row] += direction[i];
  for (size_t row = 0; row < rows.size(); ++row) ratios[row] = Lamb::ratio(w[row], u[row]);
  return ratios;
}

struct Runner {
  template <class Algorithm>
  static void run(const Algorithm& algorithm, const OnDevice& numbers, const std::vector<Row>& rows, const Tensor&) {
    if (numbers.skip()) return;
    if constexpr (std::is_same_v<Algorithm, Lamb>)
      update(algorithm, numbers, rows, lamb_ratios(algorithm, numbers, rows));
    else
      update(algorithm, numbers, rows, {});
  }
};

}  // namespace
}  // namespace optim
}  // namespace memkern

STABLE_TORCH_LIBRARY_IMPL(memkern_cpu, CPU, m) {
  m.impl("check_and_norm", TORCH_BOX(&memkern::optim::check_and_norm));
  m.impl("advance", TORCH_BOX(&memkern::optim::advance));
  m.impl("adamw_step", TORCH_BOX(&memkern::optim::adamw_step<memkern::optim::Runner>));
  m.impl("sgd_step", TORCH_BOX(&memkern::optim::sgd_step<memkern::optim::Runner>));
  m.impl("lamb_step", TORCH_BOX(&memkern::optim::lamb_step<memkern::optim::Runner>));
  m.impl("lion_step", TORCH_BOX(&memkern::optim::lion_step<memkern::optim::Runner>));
}
