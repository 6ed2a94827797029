"""What is said of a batch that fails while outputs hold it already."""

from __future__ import annotations

from spark_abs.model import BatchId
from spark_abs.stages.outputs import said_of


def test_nothing_is_fixed_that_no_output_holds() -> None:
    assert said_of(BatchId(3), (), back=True) == ""


def test_the_way_that_is_named_exists() -> None:
    held = ("channel 'a.main' (version 5)", "sink 'out' (version 7 of /lake/out)")
    assert said_of(BatchId(3), held, back=True) == (
        "; the rows of batch 3 are fixed: channel 'a.main' (version 5), sink 'out' (version 7 of /lake/out) "
        "have committed them. Every start repeats the batch with these rows, also with other code in the "
        "stage; if the rows are what is wrong, start with restart='checkpoint', which goes back to before it"
    )
    assert said_of(BatchId(3), held[:1], back=False).endswith(
        "start over on a new root: no checkpoint was completed that one could go back to"
    )
