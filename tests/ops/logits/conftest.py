# SPDX-License-Identifier: BSD-3-Clause
import pytest
from cases import compiled


@pytest.fixture
def gpu():
    with compiled() as device:
        yield device
