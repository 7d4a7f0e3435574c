# SPDX-License-Identifier: BSD-3-Clause
"""The fuzzer: tests/fuzz/engine.py says how it works and how it is told to run longer."""

import engine


def pytest_report_header():
    return f"fuzz: {engine.CASES} cases, LIGER_FUZZ_SEED={engine.SEED}" if engine.CASES else None
