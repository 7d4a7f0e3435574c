// SPDX-License-Identifier: BSD-3-Clause

// fused_linear_ce by the wgmma engine of compute capability 9.0.
#pragma once

#include "lm_head/fused_linear_ce.h"
#include "lm_head/sm90/planner.h"

namespace liger {

// The plan of this engine, or nullopt if it cannot take the call. It takes bfloat16 and float16 with every
// option except label smoothing above 0.5, label smoothing with a softcap, and a softcap above 1024.
std::optional<LinearCePlan> plan_fused_linear_ce_sm90(const FusedLinearCe& call);
FusedLinearCeGradients fused_linear_ce_sm90(const FusedLinearCe& call, const LinearCePlan& plan);

}  // namespace liger
