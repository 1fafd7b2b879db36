// Softmax and log-softmax on the CPU; the formulas are in ../softmax.h. A row is gone through several times, each
// time in a plain loop that vectorises, in buffers that stay in the nearest cache. Rows of an inner dimension are
// copied together first.
#include "../softmax.h"
#include "rows.h"

#include <limits>

namespace memkern {
namespace {

constexpr int64_t kGrain = 16384;  // elements worth a thread of their own

// ---- Rows as they lie in memory ---------------------------------------------

constexpr int64_t kBlock = 32;  // rows of an inner dimension that are copied together: a cache line of 16-bit values
constexpr int64_t kAhead = 16;   // how many cache lines before they are needed memory is asked for them

// Elements i * inner + c, of `columns` rows c, which begin pitch() apart once they are copied together.
struct Strip {
  int64_t n, inner, columns;

  int64_t pitch() const { return inner == 1 ? n : n + kBlock; }  // not the power of two that n may be

  template <class T>
  const T* gathered(const T* from, std::vector<T>& buffer) const {
    if (inner == 1) return from;
    T* to = room<T>(nullptr, buffer);
    for (int64_t i = 0; i < n; ++i) {
      __builtin_prefetch(from + (i + kAhead) * inner);
      for (int64_t c = 0; c < columns; ++c) to[c * pitch() + i] = from[i * inner + c];
    }
    return to;
  }
  // Where rows are written that scatter() is to bring to `to`.
  template <class T>
  T* room(T* to, std::vector<T>& buffer) const {
    if (inner == 1) return to;
    buffer.resize(columns * pitch());
    return buffer.data();
  }
  template <class T>
  void scatter(const T* from, T* to) const {
    if (inner == 1 || !to) return;
    for (int64_t i = 0; i < n; ++i) {
      __builtin_prefetch(to + (i + kAhead) * inner, 1);
      for (int64_t c = 0; c < columns; ++c) to[i * inner + c] = from[c * pitch() + i];
    }
  }
};

// Calls start() once in each thread, and what that returns with (outer, the first inner, the strip) for all of shape.
template <class Start>
void for_strips(const SoftmaxShape& shape, Start start) {
  const int64_t strips = (shape.inner + kBlock - 1) / kBlock;
  const int64_t grain = std::max<int64_t>(1, kGrain / (shape.n * std::min(shape.inner, kBlock)));
  torch::stable::parallel_for(0, shape.outer * strips, grain, [&](int64_t begin, int64_t end) {
    auto body = start();
    for (int64_t item = begin; item < end; ++item) {
      const int64_t first = item % strips * kBlock;
      body(item / strips, first, Strip{shape.n, shape.inner, std::min(kBlock, shape.inner - first)});
    }
  });
}

// ---- Masks ------------------------------------------------------------------

// A row of a mask: one of the two, or neither.
template <class A>
struct MaskRow {
  const uint8_t* hidden = nullptr;
  const A* added = nullptr;
};

template <class A>
class MaskReader {
 public:
  MaskReader(const MaskRows& rows, int64_t n) : rows_(rows) {
    if (rows.type == MaskType::boolean) hidden_.resize(n);
    if (rows.type != MaskType::none && rows.type != MaskType::boolean) added_.resize(n);
  }

  MaskRow<A> row(int64_t row, int64_t n) {
    if (rows_.type == MaskType::none) return {};
    const int64_t start = rows_.start(row);
    const bool again = start == start_ && n <= n_;  // the row before had the same
    start_ = start;
    n_ = again ? n_ : n;
    switch (rows_.type) {
      case MaskType::boolean: return {bytes(again), nullptr};
      case MaskType::half: return {nullptr, widened<Half>(again)};
      case MaskType::bfloat16: return {nullptr, widened<BFloat16>(again)};
      default: return {nullptr, widened<float>(again)};
    }
  }

 private:
  const uint8_t* bytes(bool again) {
    const uint8_t* from = static_cast<const uint8_t*>(rows_.data) + start_;
    if (rows_.key_stride == 1) return from;
    for (int64_t i = 0; i < n_ && !again; ++i) hidden_[i] = from[i * rows_.key_stride];
    return hidden_.data();
  }
  template <class M>
  const A* widened(bool again) {
    if (!again) widen_strided(static_cast<const M*>(rows_.data) + start_, rows_.key_stride, n_, added_.data());
    return added_.data();
  }
  template <class M>
  MEMKERN_CLONES static void widen_strided(const M* from, int64_t stride, int64_t n, A* to) {
    if (stride == 1)
      for (int64_t i = 0; i < n; ++i) to[i] = widen(from[i]);
    else
      for (int64_t i = 0; i < n; ++i) to[i] = widen(from[i * stride]);
  }

  const MaskRows& rows_;
  int64_t start_ = -1, n_ = 0;
  std::vector<uint8_t> hidden_;
  std::vector<A> added_;
};

// ---- Dropout ----------------------------------------------------------------

MEMKERN_CLONES void draw_blocks(uint64_t seed, uint64_t block, int64_t count, uint32_t* to) {
  for (int64_t i = 0; i < count; ++i) {
    const Numbers numbers = philox(seed, block + i);
    for (int lane = 0; lane < 4; ++lane) to[4 * i + lane] = numbers.value[lane];
  }
}

// The numbers of n elements, the first of them at `first` in memory and the others `stride` apart.
const uint32_t* draw(uint64_t seed, int64_t first, int64_t stride, int64_t n, std::vector<uint32_t>& buffer) {
  if (stride == 1) {
    const int64_t before = first % 4, blocks = (before + n + 3) / 4;
    buffer.resize(4 * blocks);
    draw_blocks(seed, first / 4, blocks, buffer.data());
    return buffer.data() + before;
  }
  buffer.resize(n);
  for (int64_t i = 0; i < n; ++i) {
    const int64_t at = first + i * stride;
    buffer[i] = philox(seed, at / 4).value[at % 4];
  }
  return buffer.data();
}

// ---- Arithmetic -------------------------------------------------------------

// e^d for d up to 1, times 2^64 in fp32: all of a row's are normal numbers then, and the division by their sum
// takes the factor out again.
MK_HD float scaled_exp(float d) {
  const float t = -d;
  const math::Exp e = math::exp64(t, t, 0.0f);
  return t > 119.0f ? 0.0f : e.scale + e.scale * e.c;
}
MK_HD double scaled_exp(double d) { return std::exp(d); }
template <class A>
constexpr A kUnscaled = sizeof(A) == 8 ? 1 : 0x1p-64;

// The row after the next, fetched on the way through this one: memory takes that long to deliver it.
template <class... T>
MK_HD void fetch([[maybe_unused]] int64_t i, T*... rows_after_next) {
  (__builtin_prefetch(rows_after_next + i), ...);
}

// Of z, no NaN; -inf where all are.
template <class A, class... T>
MK_HD A largest(const A* z, int64_t n, T*... rows_after_next) {
  A rest = -A(INFINITY);
  Vector<A> strands[4] = {rest - Vector<A>{}, rest - Vector<A>{}, rest - Vector<A>{}, rest - Vector<A>{}};
  for_lanes<A>(n, [&](int64_t i, auto value, int strand) MEMKERN_INLINED {
    load(z + i, &value);
    fetch(i, rows_after_next...);
    if constexpr (std::is_same_v<decltype(value), A>) rest = larger(value, rest);
    else strands[strand] = value > strands[strand] ? value : strands[strand];
  });
  for (const Vector<A>& lanes : strands)
    for (int64_t i = 0; i < kLanes<A>; ++i) rest = larger(lanes[i], rest);
  return rest;
}

template <class A, class... T>
MK_HD A sum_of(const A* values, int64_t n, T*... rows_after_next) {
  Sum<A> sum;
  for_lanes<A>(n, [&](int64_t i, auto value, int strand) MEMKERN_INLINED {
    load(values + i, &value);
    fetch(i, rows_after_next...);
    sum.add(strand, value);
  }, sum);
  return sum.total;
}

template <class A, class... T>
MK_HD A sum_of_products(const A* values, const A* others, int64_t n, T*... rows_after_next) {
  Sum<A> sum;
  for_lanes<A>(n, [&](int64_t i, auto value, int strand) MEMKERN_INLINED {
    auto other = value;
    load(values + i, &value);
    load(others + i, &other);
    fetch(i, rows_after_next...);
    sum.add(strand, value * other);
  }, sum);
  return sum.total;
}

template <class A>
struct Options {
  A scale;
  bool log, zero_masked;
  Dropout<A> dropout;
};

// What there is a largest of: z where a mask is added, else x with the sign of scale. `x` may be `to`.
template <class A>
MK_HD void ranks(const Scale<A>& scale, const A* x, const MaskRow<A>& mask, int64_t n, A* to) {
  if (mask.added)
    for (int64_t i = 0; i < n; ++i) to[i] = logit(x[i] * scale.sign, scale.positive, mask.added[i]);
  else if (mask.hidden)
    for (int64_t i = 0; i < n; ++i) to[i] = mask.hidden[i] ? -A(INFINITY) : x[i] * scale.sign;
  else
    for (int64_t i = 0; i < n; ++i) to[i] = x[i] * scale.sign;
}

// y of a row, of which the first `live` elements count, and what dropout makes of it (where numbers are given).
template <class T, class U, class A>
MEMKERN_CLONES void forward_row(const Options<A>& a, const T* x, const MaskRow<A>& mask, const uint32_t* numbers,
                                int64_t live, int64_t n, A* buffer, A* e, U* y, U* dropped) {
  const Scale<A> parts(a.scale);
  const A* wide = widened(x, live, mask.added ? e : buffer);
  const A* rank = wide;
  if (mask.added || mask.hidden || parts.sign != 1) ranks(parts, wide, mask, live, buffer), rank = buffer;
  const A scale = parts.positive, sign = parts.sign, shift = shift_of(largest(rank, live, x + 2 * n, y + 2 * n));
  if (mask.added) {
    for (int64_t i = 0; i < live; ++i) e[i] = scaled_exp(shifted(wide[i] * sign, scale, shift, mask.added[i]));
  } else {
    for (int64_t i = 0; i < live; ++i) e[i] = scaled_exp(shifted(rank[i], scale, shift));
  }
  const A sum = sum_of(e, live);
  const A factor = softmax_factor(sum, a.zero_masked);
  if (a.log) {
    const A log_sum = std::log(sum * kUnscaled<A>);
    store_row(y, live, buffer, [&](int64_t i) MEMKERN_INLINED { return shifted(rank[i], scale, shift) - log_sum; });
  } else {
    store_row(y, live, buffer, [&](int64_t i) MEMKERN_INLINED { return e[i] * factor; });
  }
  const A rest = sum != 0 || a.zero_masked ? A(0) : std::numeric_limits<A>::quiet_NaN();
  for (int64_t i = live; i < n; ++i) store(y + i, rest);
  if (!numbers) return;
  store_row(dropped, live, buffer, [&](int64_t i) MEMKERN_INLINED { return a.dropout(e[i] * factor, numbers[i]); });
  for (int64_t i = live; i < n; ++i) store(dropped + i, a.dropout(rest, numbers[i]));
}

// dx, which may be dy.
template <class T, class U, class A>
MEMKERN_CLONES void backward_row(const Options<A>& a, const U* dy, const U* y, const uint32_t* numbers, int64_t live,
                                 int64_t n, A* g_row, A* p_row, T* dx) {
  const A* g = widened(dy, live, g_row);
  const A* p = widened(y, live, p_row);
  if (numbers) {
    for (int64_t i = 0; i < live; ++i) g_row[i] = a.dropout(g[i], numbers[i]);
    g = g_row;
  }
  if (a.log) {
    const A sum = sum_of(g, live, dy + 2 * n, y + 2 * n, dx + 2 * n) * kUnscaled<A>;
    store_row(dx, live, p_row, [&](int64_t i) MEMKERN_INLINED { return a.scale * (g[i] - scaled_exp(p[i]) * sum); });
  } else {
    const A sum = sum_of_products(g, p, live, dy + 2 * n, y + 2 * n, dx + 2 * n);
    store_row(dx, live, p_row, [&](int64_t i) MEMKERN_INLINED { return a.scale * p[i] * (g[i] - sum); });
  }
  for (int64_t i = live; i < n; ++i) store(dx + i, A(0));
}

// ---- Ops --------------------------------------------------------------------

// Calls body(type tag of x, type tag of y).
template <class Body>
void for_dtypes(ScalarType x, ScalarType y, Body body) {
  check_softmax_dtypes(x, y);
  for_dtype(x, [&](auto type) { x == y ? body(type, type) : body(type, acc_t<decltype(type)>{}); });
}

template <class A>
uint64_t seed_of(const Dropout<A>& dropout) {
  return dropout.seed ? *dropout.seed : 0;
}

std::tuple<Tensor, Tensor> softmax_forward(const Tensor& input, const MaybeTensor& mask, int64_t dim, double scale,
                                           bool causal, bool log, bool zero_masked, double dropout,
                                           const MaybeTensor& seed, ScalarType dtype) {
  check_log(log, mask, causal, dropout);
  const SoftmaxShape shape = softmax_shape(input, dim, causal);
  const Tensor x = torch::stable::contiguous(input);
  Tensor held;  // keeps the mask
  const MaskRows mask_at = mask_rows(x, mask, dim, held);
  Tensor y, dropped;
  for_dtypes(x.scalar_type(), dtype, [&](auto type, auto y_type) {
    using T = decltype(type);
    using U = decltype(y_type);
    using A = acc_t<T>;
    const Options<A> a{A(scale), log, zero_masked, dropout_of<A>(x, dropout, seed)};
    y = fresh(x, x.sizes(), dtype);
    dropped = fresh(x, dropout > 0 ? x.sizes() : torch::headeronly::IntHeaderOnlyArrayRef({0}), dtype);
    if (x.numel() == 0) return;
    const T* from = const_data<T>(x);
    U *to = mutable_data<U>(y), *to_dropped = mutable_data<U>(dropped);
    for_strips(shape, [&] {
      return [&, masks = MaskReader<A>(mask_at, shape.n), z = std::vector<A>(shape.n), e = std::vector<A>(shape.n),
              x_rows = std::vector<T>(), y_rows = std::vector<U>(), dropped_rows = std::vector<U>(),
              numbers = std::vector<uint32_t>()](int64_t outer, int64_t inner, const Strip& strip) mutable {
        const int64_t n = strip.n, at = outer * n * strip.inner + inner, pitch = strip.pitch();
        U* dropped_at = to_dropped ? to_dropped + at : nullptr;
        const T* rows = strip.gathered(from + at, x_rows);
        U *out = strip.room(to + at, y_rows), *out_dropped = dropped_at ? strip.room(dropped_at, dropped_rows) : nullptr;
        for (int64_t c = 0; c < strip.columns; ++c) {
          const uint32_t* drawn = nullptr;
          if (dropped_at) drawn = draw(seed_of(a.dropout), at + c, strip.inner, n, numbers);
          const int64_t live = shape.live(outer);
          forward_row(a, rows + c * pitch, masks.row(outer, live), drawn, live, n, z.data(), e.data(), out + c * pitch,
                      out_dropped ? out_dropped + c * pitch : nullptr);
        }
        strip.scatter(out, to + at);
        strip.scatter(out_dropped, dropped_at);
      };
    });
  });
  return {y, dropped};
}

// dx may be dy.
void backward_into(Tensor& dx, const Tensor& dy, const Tensor& y, int64_t dim, double scale, bool causal, bool log,
                   double dropout, const MaybeTensor& seed) {
  check_log(log, std::nullopt, causal, dropout);
  const SoftmaxShape shape = softmax_shape(y, dim, causal);
  for_dtypes(dx.scalar_type(), y.scalar_type(), [&](auto type, auto y_type) {
    using T = decltype(type);
    using U = decltype(y_type);
    using A = acc_t<T>;
    const Options<A> a{A(scale), log, false, dropout_of<A>(y, dropout, seed)};
    if (y.numel() == 0) return;
    const U *from_dy = const_data<U>(dy), *from_y = const_data<U>(y);
    T* to = mutable_data<T>(dx);
    for_strips(shape, [&] {
      return [&, g = std::vector<A>(shape.n), p = std::vector<A>(shape.n), dy_rows = std::vector<U>(),
              y_rows = std::vector<U>(), dx_rows = std::vector<T>(),
              numbers = std::vector<uint32_t>()](int64_t outer, int64_t inner, const Strip& strip) mutable {
        const int64_t n = strip.n, at = outer * n * strip.inner + inner, pitch = strip.pitch();
        const U *rows_dy = strip.gathered(from_dy + at, dy_rows), *rows_y = strip.gathered(from_y + at, y_rows);
        T* out = strip.room(to + at, dx_rows);
        for (int64_t c = 0; c < strip.columns; ++c) {
          const uint32_t* drawn = nullptr;
          if (dropout > 0) drawn = draw(seed_of(a.dropout), at + c, strip.inner, n, numbers);
          backward_row(a, rows_dy + c * pitch, rows_y + c * pitch, drawn, shape.live(outer), n, g.data(), p.data(),
                       out + c * pitch);
        }
        strip.scatter(out, to + at);
      };
    });
  });
}

Tensor softmax_backward(const Tensor& dy, const Tensor& y, int64_t dim, double scale, bool causal, bool log,
                        double dropout, const MaybeTensor& seed, ScalarType dtype) {
  check_like_y(y, dy);
  check_softmax_dtypes(dtype, y.scalar_type());
  Tensor dx = fresh(y, y.sizes(), dtype);
  backward_into(dx, torch::stable::contiguous(dy), torch::stable::contiguous(y), dim, scale, causal, log, dropout, seed);
  return dx;
}

void softmax_backward_(Tensor dy, const Tensor& y, int64_t dim, double scale, bool causal, bool log, double dropout,
                       const MaybeTensor& seed) {
  check_like_y(y, dy);
  STD_TORCH_CHECK(dy.is_contiguous(), "dy: needs to be contiguous, to be written over");
  backward_into(dy, dy, torch::stable::contiguous(y), dim, scale, causal, log, dropout, seed);
}

}  // namespace
}  // namespace memkern

STABLE_TORCH_LIBRARY_IMPL(memkern_cpu, CPU, m) {
  m.impl("softmax_forward", TORCH_BOX(&memkern::softmax_forward));
  m.impl("softmax_backward", TORCH_BOX(&memkern::softmax_backward));
  m.impl("softmax_backward_", TORCH_BOX(&memkern::softmax_backward_));
}
