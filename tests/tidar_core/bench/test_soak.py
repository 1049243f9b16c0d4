"""Mixed traffic for seconds: what the longer run counts is counted here too."""

from tests.tidar_core.engines import prompts, tiny_engine
from tidar_core.bench.soak import run_soak


def test_no_request_is_lost(tmp_path):
    engine = tiny_engine(tmp_path, cache_tokens=40 * 16, max_model_len=512)
    result = run_soak(engine, prompts(8, longest=30), 6.0)
    assert result.asked > 20
    assert result.asked == result.finished + result.left + result.refused + result.wrong
    assert (result.lost, result.wrong, result.pages_owned_at_the_end) == (0, 0, 0)
    assert not engine.has_work
