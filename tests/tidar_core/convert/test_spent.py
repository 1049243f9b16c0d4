"""How the time of a conversion is shared: each answers for its own gathering, and for no other's."""

from pathlib import Path

import pytest

from tests.tidar_core.convert.documents import HEADER
from tests.tidar_core.convert.trained import BRIEF, SMALL, run_command
from tests.tiny import tiny_checkpoint
from tidar_core.config import ConfigError
from tidar_core.convert import run
from tidar_core.convert.checkpoint import Progress
from tidar_core.convert.growing import Growing, read_growing, write_growing
from tidar_core.convert.options import ConvertOptions
from tidar_core.convert.shards import ShardStore
from tidar_core.convert.spent import SPENT_FILE, Spent, left_for_training, most_gathering

OPTIONS = SMALL[2:]  # with no number of own words


@pytest.fixture
def budgets(monkeypatch) -> list[float]:
    """The seconds that trainings got, none of which takes place."""
    found: list[float] = []

    def trained(*given) -> Progress:
        found.append(given[4].seconds)
        return Progress(step=1, best=2.0)

    monkeypatch.setattr(run, "train_drafter", trained)
    return found


def test_words_of_another_run_cost_no_time(tmp_path, gathered, budgets):
    model, data = gathered
    ShardStore(data, HEADER).append([], [], 3600.0)
    for goal in ((), SMALL[:2]):
        status, output = run_command(model, "--out", tmp_path / "out", "--data", data, "--minutes", 1, *OPTIONS, *goal)
        assert status == 0, output
        assert "gathering took" not in output
    assert budgets == [60.0, 60.0]


def test_who_goes_on_with_the_words_of_others_answers_for_none_of_theirs(tmp_path):
    """Though it has a checkpoint, and no file that says what it has gathered: its own words are beside that."""
    options = ConvertOptions("", tmp_path / "out", tmp_path / "data")
    (options.work / "training").mkdir(parents=True)
    (options.work / "training" / "step-00000001.safetensors").touch()
    assert Spent(options, 3600.0).seconds == 3600.0, "as in the version that counted all"
    (options.work / "data").mkdir()
    assert Spent(options, 3600.0).seconds == 0.0


def test_words_of_its_own_cost_what_they_took(tmp_path, gathered, budgets):
    model, data = gathered
    (tmp_path / "out.work").mkdir()
    data.rename(tmp_path / "out.work" / "data")
    store = ShardStore(tmp_path / "out.work" / "data", HEADER)
    for seconds, left in ((30.0 - store.read().seconds, 30.0), (3600.0, 6.0)):
        store.append([], [], seconds)
        status, output = run_command(model, "--out", tmp_path / "out", "--minutes", 1, *OPTIONS)
        assert status == 0, output
        assert f"{left / 60:.1f} min of --minutes are for training" in output
        assert budgets.pop() == pytest.approx(left)


def test_what_is_gathered_beside_the_words_of_another_run_costs_its_time_alone(tmp_path, gathered, budgets):
    """Also that of earlier runs of the same conversion; a limit of time holds for them together."""
    model, data = gathered
    store = ShardStore(data, HEADER)
    store.append([], [], 3600.0)
    before, tokens = store.read().seconds, store.read().corpus.generated_tokens()
    common = (model, "--out", tmp_path / "out", "--data", data, "--minutes", 2, *OPTIONS, "--own-tokens")
    for more in (200, 400):
        status, output = run_command(*common, tokens + more)
        assert status == 0, output
        assert budgets.pop() == pytest.approx(120 - (store.read().seconds - before))
        assert store.read().corpus.generated_tokens() >= tokens + more

    (tmp_path / "out.work" / SPENT_FILE).write_text('{"format": 1, "seconds": 108.0}')
    shards = sorted(data.iterdir())
    status, output = run_command(*common, 10**6)
    assert status == 0, output
    assert "gathering took 1.8 min: 0.2 min of --minutes are for training" in output
    assert sorted(data.iterdir()) == shards


def test_a_number_of_own_words_does_not_switch_the_time_off(tmp_path, gathered, budgets):
    model, data = gathered
    common = (model, "--out", tmp_path / "out", "--data", data, "--minutes", 0.1, *OPTIONS)
    status, output = run_command(*common, "--own-tokens", 10**8)
    assert status == 0, output
    assert "of 100,000,000 tokens are there, and the time for gathering is over" in output
    assert 0.1 * 6 <= budgets[0] < 0.3 * 6


def test_what_is_missing_is_told_where_a_folder_has_used_up_its_time(tmp_path, gathered, budgets):
    model, data = gathered
    (tmp_path / "out.work").mkdir()
    data.rename(tmp_path / "out.work" / "data")
    ShardStore(tmp_path / "out.work" / "data", HEADER).append([], [], 3600.0)
    status, output = run_command(model, "--out", tmp_path / "out", "--minutes", 1, *OPTIONS, "--own-tokens", 10**8)
    assert status == 0, output
    assert output.count("of 100,000,000 tokens are there, and the time for gathering is over") == 1


def test_a_number_of_own_words_and_of_steps_leave_the_time_out(tmp_path, gathered, budgets):
    model, data = gathered
    store = ShardStore(data, HEADER)
    more = store.read().corpus.generated_tokens() + 200
    Spent(ConvertOptions("", tmp_path / "out", data), 0.0).add(3600.0)
    common = (model, "--out", tmp_path / "out", "--data", data, "--minutes", 1, "--steps", 3, *OPTIONS)
    status, output = run_command(*common, "--own-tokens", more)
    assert status == 0, output
    assert store.read().corpus.generated_tokens() >= more
    assert budgets == [0.0]
    assert "the time for gathering" not in output


def test_what_cannot_be_read_counts_as_nothing(tmp_path):
    options = ConvertOptions(model="", out=tmp_path / "out", data=tmp_path / "data", minutes=10.0)
    options.work.mkdir()
    Spent(options, 50.0).add(7.0)
    assert Spent(options, 90.0).seconds == 7.0
    (options.work / SPENT_FILE).write_text("{")
    assert Spent(options, 90.0).seconds == 0.0
    assert [most_gathering(options), left_for_training(options, 500.0), left_for_training(options, 599.0)] == [
        540.0, 100.0, 60.0,
    ]  # fmt: skip


def test_what_a_folder_by_another_name_gathers_is_kept_beside_its_checkpoints(tmp_path, gathered, budgets):
    model, data = gathered
    (tmp_path / "out").mkdir()
    (tmp_path / "links").mkdir()
    link = tmp_path / "links" / "link"
    link.symlink_to(tmp_path / "out")
    more = ShardStore(data, HEADER).read().corpus.generated_tokens() + 200
    status, output = run_command(model, "--out", link, "--data", data, *OPTIONS, "--own-tokens", more)
    assert status == 0, output
    assert 0.0 < Spent(ConvertOptions("", link, data), 0.0).seconds < 60.0


def test_a_folder_for_them_that_cannot_be_made_is_one_line(tmp_path):
    options = ConvertOptions("", tmp_path / "out", tmp_path / "data")
    options.work.write_text("a file")
    with pytest.raises(ConfigError, match=f"{SPENT_FILE}: it cannot be written"):
        Spent(options, 0.0).add(1.0)


def checkpoint_in(work: Path) -> None:
    (work / "training").mkdir(parents=True)
    (work / "training" / "step-00000007.safetensors").touch()


def test_trainings_that_kept_no_count_of_their_own_answer_for_all_that_is_there(tmp_path):
    """As they did before there was one."""
    options = ConvertOptions("", tmp_path / "out", tmp_path / "data")
    assert Spent(options, 90.0).seconds == 0.0
    checkpoint_in(options.work)
    Spent(options, 90.0).add(1.0)
    assert Spent(options, 500.0).seconds == 91.0


def test_a_training_on_the_words_of_others_is_not_taken_for_one_of_those(tmp_path, gathered, budgets):
    model, data = gathered
    ShardStore(data, HEADER).append([], [], 3600.0)
    for _ in range(2):
        status, output = run_command(model, "--out", tmp_path / "out", "--data", data, "--minutes", 1, *OPTIONS)
        assert status == 0, output
        if len(budgets) == 1:
            checkpoint_in(tmp_path / "out.work")
    assert budgets == [60.0, 60.0]


def test_what_was_on_its_way_is_ended_for_its_own_model_and_seed_alone(tmp_path, gathered, budgets):
    """By another seed or another template it would be taken for another conversation."""
    model, data = gathered
    other = tiny_checkpoint(tmp_path / "other", seed=1, **BRIEF)
    kept = [Growing(number=10**6, prompt="", heard=(), said=(5, 6, 7))]
    write_growing(data, kept)
    for name, of, seed in (("a", model, 1), ("b", other, 0), ("c", model, 0)):
        assert read_growing(data) == kept
        assert 10**6 not in ShardStore(data, HEADER).read().done
        status, output = run_command(of, "--out", tmp_path / name, "--data", data, "--seed", seed, *SMALL)
        assert status == 0, output
    assert read_growing(data) == []
    assert 10**6 in ShardStore(data, HEADER).read().done
    assert len(budgets) == 3
