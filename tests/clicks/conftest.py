"""What all tests of click models need."""

from __future__ import annotations

import pytest
import torch


@pytest.fixture(scope="session", autouse=True)
def one_thread() -> None:
    """Test processes run side by side: more threads in each would only get into each other's way."""
    torch.set_num_threads(1)
