// SPDX-License-Identifier: BSD-3-Clause

// experts.cpp with 1023 small experts.
#define LIGER_MANY_EXPERTS
#include "experts.cpp"
