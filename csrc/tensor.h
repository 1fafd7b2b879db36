// What the CPU and the CUDA ops both need of tensors, on PyTorch's stable ABI.
#pragma once

#include <torch/csrc/stable/library.h>
#include <torch/csrc/stable/ops.h>
#include <torch/csrc/stable/tensor.h>
#include <torch/headeronly/core/ScalarType.h>
#include <torch/headeronly/util/Exception.h>

#include <algorithm>
#include <cstdint>
#include <optional>
#include <string>
#include <vector>

// The emulator fills fresh outputs with a pattern here, so that an element left unwritten shows.
#ifndef MEMKERN_FRESH
#define MEMKERN_FRESH(pointer, bytes)
#endif

namespace memkern {

using torch::headeronly::ScalarType;
using torch::stable::Tensor;
using MaybeTensor = std::optional<Tensor>;

// Whether the elements fill one stretch of memory, in whatever order of dimensions (contiguous,
// channels_last, transposed ...): elementwise work is then one flat loop over that stretch.
inline bool is_dense(const Tensor& x) {
  if (x.numel() < 2 || x.is_contiguous()) return true;
  std::vector<std::pair<int64_t, int64_t>> dims;  // (stride, size)
  for (int64_t d = 0; d < x.dim(); ++d)
    if (x.size(d) != 1) dims.emplace_back(x.stride(d), x.size(d));
  std::sort(dims.begin(), dims.end());
  int64_t expected = 1;
  for (const auto& [stride, size] : dims) {
    if (stride != expected) return false;
    expected *= size;
  }
  return true;
}

// An uninitialised tensor of x's shape and dtype; of its strides too where x is dense.
inline Tensor new_like(const Tensor& x) {
  Tensor y = torch::stable::empty_like(x);
  MEMKERN_FRESH(y.data_ptr(), y.numel() * y.element_size());
  return y;
}

// Uninitialised and contiguous, on x's device.
inline Tensor fresh(const Tensor& x, torch::headeronly::IntHeaderOnlyArrayRef sizes, ScalarType dtype) {
  Tensor result = torch::stable::new_empty(x, sizes, dtype);
  MEMKERN_FRESH(result.data_ptr(), result.numel() * result.element_size());
  return result;
}

inline Tensor copied_into(Tensor target, const Tensor& source) {
  return torch::stable::copy_(target, source);
}

// x itself where it is dense, else a dense copy.
inline Tensor dense(const Tensor& x) {
  return is_dense(x) ? x : copied_into(new_like(x), x);
}

// y (which has x's shape and dtype) in x's memory order; x is dense.
inline Tensor in_order_of(const Tensor& x, const Tensor& y, const char* name) {
  bool same_shape = x.dim() == y.dim(), same_strides = true;
  for (int64_t d = 0; same_shape && d < x.dim(); ++d) {
    same_shape = x.size(d) == y.size(d);
    same_strides &= x.stride(d) == y.stride(d) || x.size(d) == 1;
  }
  STD_TORCH_CHECK(same_shape && x.scalar_type() == y.scalar_type() && x.get_device_index() == y.get_device_index(),
                  name, ": needs the shape, dtype and device of x");
  return same_strides ? y : copied_into(new_like(x), y);
}

inline bool same_shape(const Tensor& x, const Tensor& y) {
  bool same = x.dim() == y.dim();
  for (int64_t d = 0; same && d < x.dim(); ++d) same = x.size(d) == y.size(d);
  return same;
}

inline bool on_one_device(const Tensor& x, const Tensor& y) { return x.get_device_index() == y.get_device_index(); }

// The dtype of arithmetic, and of what is saved of a row.
inline ScalarType statistics_dtype(const Tensor& x) {
  return x.scalar_type() == ScalarType::Double ? ScalarType::Double : ScalarType::Float;
}

template <class T>
const T* const_data(const Tensor& x) {
  return static_cast<const T*>(x.const_data_ptr());
}
// nullptr where there is none.
template <class T>
const T* const_data(const MaybeTensor& x) {
  return x ? const_data<T>(*x) : nullptr;
}
// nullptr where it was not needed; a gradient that is needed and has no elements has nothing to write either.
template <class T>
T* mutable_data(Tensor& x) {
  return x.numel() > 0 ? static_cast<T*>(x.mutable_data_ptr()) : nullptr;
}

// The GELU form by its PyTorch name.
inline bool is_tanh(const std::string& approximate) {
  STD_TORCH_CHECK(approximate == "tanh" || approximate == "none", "approximate: got '", approximate,
                  "', needs 'none' or 'tanh'");
  return approximate == "tanh";
}

}  // namespace memkern
