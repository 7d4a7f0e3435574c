// SPDX-License-Identifier: BSD-3-Clause

// Diagnostics on stderr, which LIGER_LOG selects.
#pragma once

#include <string>

namespace liger {

// True if LIGER_LOG contains `plan`.
bool logs_plans();
// Prints "liger: <plan>", once for each text.
void log_plan(const std::string& plan);

}  // namespace liger
