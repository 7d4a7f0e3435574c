// SPDX-License-Identifier: BSD-3-Clause

// fused_linear_ce by cuBLAS GEMMs, for every device, dtype and option.
#pragma once

#include "lm_head/fused_linear_ce.h"

namespace liger {

FusedLinearCeGradients fused_linear_ce_generic(const FusedLinearCe& call);

}  // namespace liger
