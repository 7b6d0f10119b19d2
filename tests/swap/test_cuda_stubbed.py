"""The CUDA backend without a GPU: test_cuda.py on the stubbed driver."""

from pathlib import Path

import pytest

from megatron_memo import platform
from tests.stub_cuda.stubbed import names_of_tests, outcome

FILE = Path(__file__).with_name("test_cuda.py")


@pytest.mark.skipif(not platform.is_active(), reason="test_cuda.py runs on the GPU itself")
@pytest.mark.parametrize("name", names_of_tests(FILE))
def test_on_the_stubbed_driver(name):
    outcome(FILE, name)
