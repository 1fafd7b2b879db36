// What LayerNorm and RMSNorm check and allocate, on the CPU and on CUDA. Schemas: memkern/ops.py.
#pragma once

#include "tensor.h"

namespace memkern {

inline int64_t norm_rows(const Tensor& x, int64_t columns) {
  const bool fits = columns > 0 ? x.numel() % columns == 0 : columns == 0 && x.numel() == 0;
  STD_TORCH_CHECK(fits, "columns: got ", columns, ", which does not divide the ", x.numel(), " elements of x");
  return columns > 0 ? x.numel() / columns : 0;
}

// value, which has x's shape, dtype and device, with its rows one after the other.
inline Tensor in_rows(const Tensor& x, const Tensor& value, const char* name) {
  STD_TORCH_CHECK(same_shape(x, value) && value.scalar_type() == x.scalar_type() && on_one_device(x, value), name,
                  ": needs the shape, dtype and device of x");
  return torch::stable::contiguous(value);
}
inline MaybeTensor in_rows(const Tensor& x, const MaybeTensor& value, const char* name) {
  return value ? MaybeTensor(in_rows(x, *value, name)) : std::nullopt;
}

// weight or bias: x's dtype or fp32.
inline MaybeTensor parameter(const Tensor& x, const MaybeTensor& value, int64_t columns, const char* name) {
  if (!value) return value;
  STD_TORCH_CHECK(value->numel() == columns && value->get_device_index() == x.get_device_index(), name, ": needs ",
                  columns, " elements on the device of x");
  STD_TORCH_CHECK(value->scalar_type() == x.scalar_type() ||
                      (value->scalar_type() == ScalarType::Float && x.element_size() == 2),
                  name, ": needs the dtype of x, or float32 where x is float16 or bfloat16");
  return torch::stable::contiguous(*value);
}

// Whether weight and bias, of one dtype, are fp32 where x is not.
inline bool parameters_are_fp32(const Tensor& x, const MaybeTensor& weight, const MaybeTensor& bias) {
  STD_TORCH_CHECK(!weight || !bias || weight->scalar_type() == bias->scalar_type(), "bias: needs the dtype of weight");
  const MaybeTensor& either = weight ? weight : bias;
  return either && either->scalar_type() != x.scalar_type();
}

// Uninitialised and contiguous, like `like`; without elements where it is not needed.
inline Tensor fresh_if(bool needed, const Tensor& x, const MaybeTensor& like, const char* name) {
  if (!needed) return fresh(x, {0}, x.scalar_type());
  STD_TORCH_CHECK(like.has_value(), name, ": asked for without the tensor it is the gradient of");
  return fresh(*like, like->sizes(), like->scalar_type());
}

// Row statistics as saved by the forward pass.
inline Tensor statistics(const Tensor& x, const Tensor& value, int64_t rows, const char* name) {
  STD_TORCH_CHECK(value.numel() == rows && value.scalar_type() == statistics_dtype(x), name, ": needs ", rows,
                  " elements of the dtype that x is computed in");
  return torch::stable::contiguous(value);
}

}  // namespace memkern
