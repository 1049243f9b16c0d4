"""What comes often is told once in a while, of a bounded number of things."""

from cluster.observe.seldom import Seldom


class Clock:
    now = 0.0

    def __call__(self) -> float:
        return self.now


def test_it_is_told_how_often_it_came_since() -> None:
    clock = Clock()
    seldom = Seldom(10.0, clock=clock)
    assert [seldom.times() for _ in range(4)] == [1, 0, 0, 0]
    clock.now = 9.9
    assert seldom.times() == 0
    clock.now = 10.0
    assert seldom.times() == 5
    clock.now = 30.0
    assert seldom.times() == 1


def test_each_thing_is_told_for_itself() -> None:
    seldom = Seldom(10.0, most=2, clock=Clock())
    assert [seldom.times(name) for name in "abab"] == [1, 1, 0, 0]


def test_who_makes_up_ever_new_things_is_told_of_as_many_as_are_remembered() -> None:
    clock = Clock()
    seldom = Seldom(10.0, most=3, clock=clock)
    assert [seldom.times(number) for number in range(9)] == [1, 1, 1, *[0] * 6]
    clock.now = 10.0
    assert [seldom.times(number) for number in (2, 7, 8, 9)] == [1, 1, 1, 0]
    assert seldom.times(2) == 0, "those that were told now are remembered, the others not"
