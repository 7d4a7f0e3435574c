// SPDX-License-Identifier: BSD-3-Clause

// Ops that are declared: two or more schemas and one line of shapes. The argument checks
// (host/checks/declared.cpp), the fakes, the autograd formula, the DTensor rules, the vmap rule and the
// samples of the tests follow from the declaration.
#pragma once

#include <span>
#include <vector>

namespace liger {

// `schemas`: the forward, its backward, and forms of the backward that write. Their names say what each
// argument is: grad_<tensor>, need_grad_<input> and emit_<result> belong to the tensor of that name. A
// residual has the gradient of x.
//
// `shapes`: entries that are separated by semicolons. A tensor, or several with commas:
//
//   x: ... H             its dimensions. "..." stands for any number of them, or, alone, for at least one. 2I
//                        is an even dimension, twice I. An option is also a dimension, and H/group_size is a
//                        dimension that is missing if group_size is None
//   residual: like x     the shape, dtype and, of a result, the strides of x
//   weight: H or f32     a parameter in the dtype of x or in float32; all parameters of a call have one
//                        dtype. "alpha: 1 or f32" has one element
//   rstd: ... f32        float32, or float64 if x is float64: a statistic of the rows
//
// The first tensor is floating, and the others have its dtype and device. A leading "...", and "batch", are
// independent dimensions: they can be sharded and vmapped. A tensor without them is a parameter, and its
// gradient is a sum over them. The options:
//
//   eps >= 0             and finite
//   offset finite
//   group_size divides H
//   approximate in none tanh
struct Declaration {
  std::vector<const char*> schemas;
  const char* shapes;
};

std::span<const Declaration> declarations();

}  // namespace liger
