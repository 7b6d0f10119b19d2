"""The CUDA front-end without a GPU: test_cuda.py on the stubbed driver, with torch's segments of
both kinds; and what the front-end refuses to stand before."""

from pathlib import Path

import pytest

from megatron_memo import platform
from megatron_memo.allocator.errors import AllocatorError
from megatron_memo.allocator.face import get_allocator
from tests.stub_cuda.stubbed import names_of_tests, outcome, run_script

pytestmark = pytest.mark.skipif(
    not platform.is_active(), reason="test_cuda.py runs on the GPU itself"
)

FILE = Path(__file__).with_name("test_cuda.py")


@pytest.mark.parametrize("segments", ["", "expandable_segments:True"], ids=["native", "expandable"])
@pytest.mark.parametrize("name", names_of_tests(FILE))
def test_on_the_stubbed_driver(name, segments):
    outcome(FILE, name, segments)


INSTALL = """
from megatron_memo.allocator.errors import AllocatorError
from megatron_memo.allocator.face import get_allocator
try:
    get_allocator("cuda")
    print("installed")
except AllocatorError as error:
    print(error)
"""


@pytest.mark.parametrize(
    ("variable", "value", "says"),
    [
        ("PYTORCH_CUDA_ALLOC_CONF", "backend:cudaMallocAsync", 'is "cudaMallocAsync", and only'),
        ("PYTORCH_NO_CUDA_MEMORY_CACHING", "1", "unset PYTORCH_NO_CUDA_MEMORY_CACHING"),
    ],
)
def test_an_allocator_that_cannot_be_planned_is_refused_by_name(variable, value, says):
    assert says in run_script(INSTALL, {variable: value})


def test_a_machine_without_a_gpu_is_told_so():
    with pytest.raises(AllocatorError, match="needs a CUDA device, there is none"):
        get_allocator("cuda")
