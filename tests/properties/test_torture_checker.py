"""The checker of the torture run, on logs written by hand: each rule refutes one that breaks it, and no other."""

import pytest

from tests import guarantees
from tests.torture.checker import RULES, Terms, Violation, check, figures, slack_of
from tests.torture.history import Fault, put_together

LEASE = Terms(ttl=2.0)
SESSION = Terms(ttl=2.0, session=True)
ONE_WRITER = Terms(ttl=2.0, one_writer=True)
END = 100.0


class Script:
    """The log of one worker, in the making."""

    def __init__(self, pid):
        self.pid = pid
        self.events = [{"t": 0.0, "e": "up", "pid": pid, "backend": "some"}]
        self.n = 0

    def at(self, t, event, **fields):
        self.events.append({"t": t, "e": event, "n": self.n, **fields})
        return self

    def ask(self, t, wait=None, key="k"):
        self.n += 1
        self.key = key
        return self.at(t, "try", key=key, wait=wait)

    def enter(self, t, token, believes=True):
        self.token = token
        return self.at(t, "enter", token=token, sent=t - 0.01, believes=believes)

    def seen(self, t, believes=True):
        return self.at(t, "seen", believes=believes)

    def renew(self, t):
        return self.at(t, "renewed", key=self.key, token=self.token, sent=t)

    def leave(self, t, how="released", believes=None):
        self.at(t, "end", believes=how == "released" if believes is None else believes)
        self.at(t + 0.01, "left", how=how)
        if how == "lost":
            self.at(t + 0.02, "told", key=self.key, token=self.token, why="")
        return self

    def section(self, since, until, token, **how):
        """Enter at ``since``, renew every half a second, look every tenth of one, and leave at ``until``."""
        self.ask(since - 0.05, how.pop("wait", None)).enter(since, token)
        steps = round((until - since) * 10)
        for step in range(1, steps):
            moment = since + step / 10
            self.seen(moment)
            if step % 5 == 0:
                self.renew(moment)
        return self.leave(until, **how)

    def down(self):
        return self.at(END, "down")


def fault(kind, t0, t1, **fields):
    return Fault(kind, t0, t1, **fields)


def rules(scripts, terms=LEASE, faults=(), register=(), leftovers=()):
    """The names of the rules that are broken."""
    history = put_together([script.events for script in scripts], faults, register)
    return {violation.rule for violation in check(history, terms, leftovers)}


def two(first=(10.0, 11.0), second=(12.0, 13.0), tokens=(5, 6), **how):
    return [Script(1).section(*first, tokens[0], **how).down(), Script(2).section(*second, tokens[1]).down()]


@pytest.mark.parametrize("terms", [LEASE, SESSION, ONE_WRITER])
def test_a_log_that_is_as_it_should_be_is_accepted(terms):
    assert rules(two(), terms, register=[("k", 5), ("k", 6)]) == set()


def test_every_rule_has_a_test_that_breaks_it():
    tested = {name for name in globals() if name.startswith("test_")}
    missing = [rule.__name__ for rule in RULES if not any(name.startswith(f"test_{rule.__name__}") for name in tested)]
    assert missing == []


# Exclusion


def test_exclusion_is_broken_by_two_who_believe_at_once():
    assert "exclusion" in rules(two(second=(10.5, 11.5)))


def test_exclusion_is_broken_however_short_the_overlap_is():
    assert "exclusion" in rules(two(second=(10.9, 11.9)))


def test_exclusion_is_not_broken_by_one_who_knows_that_its_lock_is_lost():
    late = Script(1).ask(10.0).enter(10.1, 5).seen(10.2).seen(12.5, believes=False).leave(14.0, "lost").down()
    assert rules([late, Script(2).section(12.4, 13.4, 6).down()]) == set()


def test_exclusion_is_not_broken_on_two_keys():
    other = Script(2).ask(10.4, key="other").enter(10.5, 6).leave(11.0).down()
    assert rules([Script(1).section(10.0, 11.0, 5).down(), other]) == set()


def forced(token=5, at=10.4, key="k"):
    return fault("force", at, at + 0.05, keys=[key], token=token)


def lost_at(moment, token=5, since=10.0):
    """A holder that believes until ``moment``."""
    script = Script(1).ask(since - 0.1, 1.0).enter(since, token)
    step = since
    while (step := step + 0.5) < moment:
        script.renew(step).seen(step)
    return script.seen(moment).leave(moment + 0.1, "lost").down()


def test_exclusion_is_not_broken_by_a_loss_by_force_that_is_told_in_time():
    assert rules([lost_at(11.0), Script(2).section(10.5, 12.0, 6).down()], faults=[forced()]) == set()


@pytest.mark.parametrize("unfit", [forced(token=4), forced(key="other"), forced(at=12.5)])
def test_exclusion_is_broken_if_what_was_done_by_force_was_something_else(unfit):
    assert "exclusion" in rules([lost_at(11.0), Script(2).section(10.5, 12.0, 6).down()], faults=[unfit])


def test_exclusion_is_broken_if_a_loss_by_force_is_told_too_late():
    scripts = [lost_at(16.0), Script(2).section(10.5, 17.0, 6).down()]
    assert {"exclusion", "told_in_time"} <= rules(scripts, faults=[forced()])


def test_exclusion_is_not_broken_by_a_holder_that_was_stopped_meanwhile():
    scripts = [lost_at(16.0), Script(2).section(10.5, 17.0, 6).down()]
    stop = fault("stop", 10.5, 15.8, pid=1)
    assert "exclusion" not in rules(scripts, faults=[forced(), stop])
    assert "exclusion" in rules(scripts, faults=[forced(), fault("stop", 10.5, 15.8, pid=2)])


@pytest.mark.parametrize("kind", ["terminate", "restart", "crash"])
def test_exclusion_of_session_locks_ends_with_the_session(kind):
    scripts = [lost_at(11.5), Script(2).section(10.5, 12.0, 6).down()]
    assert rules(scripts, SESSION, [fault(kind, 10.3, 10.4)]) == set()
    assert "exclusion" in rules(scripts, LEASE, [fault(kind, 10.3, 10.4)])
    assert "exclusion" in rules(scripts, SESSION, [fault("terminate", 10.3, 10.4, keys=["other"])])


def test_exclusion_of_session_locks_ends_with_a_session_that_ended_while_they_were_granted():
    scripts = [lost_at(11.5), Script(2).section(10.5, 12.0, 6).down()]
    assert rules(scripts, SESSION, [fault("terminate", 9.9, 10.1, keys=[])]) == set()
    assert "exclusion" in rules(scripts, SESSION, [fault("terminate", 10.2, 10.3, keys=[])])


def test_exclusion_of_session_locks_is_broken_if_the_loss_is_told_too_late():
    scripts = [lost_at(16.0), Script(2).section(10.5, 17.0, 6).down()]
    assert {"exclusion", "told_in_time"} <= rules(scripts, SESSION, [fault("terminate", 10.3, 10.4, keys=["k"])])


# Loss


def test_belief_is_broken_by_a_holder_that_believes_after_the_end_of_its_lease():
    slow = Script(1).ask(10.0).enter(10.1, 5).seen(12.2).leave(12.3, "lost").down()
    assert rules([slow]) == {"belief"}
    renewed = Script(1).ask(10.0).enter(10.1, 5).renew(11.0).seen(12.2).leave(12.3).down()
    assert rules([renewed]) == set()
    assert rules([slow], SESSION) == set()


def test_belief_is_not_excused_by_having_been_stopped():
    slow = Script(1).ask(10.0).enter(10.1, 5).seen(15.0).leave(15.1, "lost").down()
    assert rules([slow], faults=[fault("stop", 10.2, 14.9, pid=1)]) == {"belief"}


def test_told_in_time_is_broken_by_a_session_that_is_gone_and_not_missed():
    scripts = [Script(1).section(10.0, 20.0, 5).down()]
    assert rules(scripts, SESSION, [fault("terminate", 10.3, 10.4, keys=["k"])]) == {"told_in_time"}
    assert rules(scripts, SESSION, [fault("terminate", 10.3, 10.4, keys=[])]) == set()
    assert rules(scripts, LEASE, [fault("terminate", 10.3, 10.4, keys=["k"])]) == set()


def test_told_in_time_allows_for_a_server_that_hangs():
    away = fault("pause", 10.5, 19.0)
    scripts = [Script(1).section(10.0, 20.0, 5).down()]
    assert rules(scripts, SESSION, [fault("terminate", 10.3, 10.4, keys=["k"]), away]) == set()


def test_signalled_is_broken_by_a_loss_without_a_signal():
    script = Script(1).ask(10.0).enter(10.1, 5).at(11.0, "end", believes=False).at(11.1, "left", how="lost")
    assert rules([script.down()]) == {"signalled"}


def test_signalled_is_not_broken_by_a_process_that_was_killed_before_it_could_be():
    script = Script(1).ask(10.0).enter(10.1, 5).at(11.0, "end", believes=False).at(11.1, "left", how="lost")
    assert rules([script], faults=[fault("kill", 11.5, 11.5, pid=1)]) == set()


# Ownership and tokens


def test_ownership_is_broken_by_a_release_of_a_lost_hold_that_says_it_was_one():
    stale = Script(1).ask(10.0).enter(10.1, 5).seen(10.2).leave(13.0, "released", believes=False).down()
    assert rules([stale, Script(2).section(12.2, 12.9, 6).down()]) == {"ownership"}
    told = Script(1).ask(10.0).enter(10.1, 5).seen(10.2).leave(13.0, "lost").down()
    assert rules([told, Script(2).section(12.2, 12.9, 6).down()]) == set()


def test_fencing_is_broken_by_a_later_grant_with_a_smaller_token():
    assert "fencing" in rules(two(tokens=(6, 5)))


def test_fencing_is_broken_by_a_token_that_was_given_twice():
    assert "fencing" in rules(two(tokens=(5, 5)))


def test_fencing_says_nothing_of_grants_at_the_same_time():
    first = Script(1).ask(10.0, 1.0).enter(10.1, 6, believes=False).leave(10.2, "lost").down()
    second = Script(2).ask(10.0, 1.0).enter(10.1, 5, believes=False).leave(10.2, "lost").down()
    assert rules([first, second]) == set()


# The register


def test_register_is_broken_by_a_smaller_token_after_a_larger_one():
    assert rules(two(), register=[("k", 5), ("k", 6), ("k", 5)]) == {"register"}
    assert rules(two(), register=[("k", 6), ("other", 5), ("k", 6)]) == set()


def test_register_is_broken_by_a_commit_that_is_not_there():
    script = Script(1).ask(10.0).enter(10.1, 5).at(10.2, "wrote", key="k", token=5).leave(10.3).down()
    assert rules([script], register=[("k", 5)]) == set()
    assert rules([script], register=[]) == {"register"}


# Answers and waiting


def refused(pid, since, until, wait):
    return Script(pid).ask(since, wait).at(until, "refused").down()


def test_refused_for_a_reason_is_broken_by_a_lock_that_nobody_holds():
    before = Script(1).section(10.0, 11.0, 5).down()
    assert rules([before, refused(2, 30.0, 30.01, None)]) == {"refused_for_a_reason"}
    assert rules([before, refused(2, 10.5, 10.51, None)]) == set()


def test_refused_for_a_reason_is_broken_by_a_release_that_goes_unheard():
    before = Script(1).section(10.0, 11.0, 5).down()
    assert rules([before, refused(2, 10.5, 15.5, 5.0)]) == {"refused_for_a_reason"}
    assert rules([before, refused(2, 10.5, 12.5, 2.0)]) == set()


def test_refused_for_a_reason_is_broken_by_a_hold_that_outlives_its_killed_holder():
    dead = Script(1).ask(10.0).enter(10.1, 5).seen(10.2)
    kill = fault("kill", 10.3, 10.3, pid=1)
    assert rules([dead, refused(2, 10.5, 20.5, 10.0)], faults=[kill]) == {"refused_for_a_reason"}
    assert rules([dead, refused(2, 10.5, 14.5, 4.0)], faults=[kill]) == set()


def test_refused_for_a_reason_allows_for_what_the_server_could_not_do():
    before = Script(1).section(10.0, 11.0, 5).down()
    waiter = refused(2, 10.5, 18.5, 8.0)
    assert rules([before, waiter], faults=[fault("pause", 11.0, 16.0)]) == set()
    assert rules([before, waiter], faults=[fault("stop", 11.0, 16.0, pid=2)]) == set()
    assert rules([before, waiter], ONE_WRITER, faults=[fault("stop", 11.0, 16.0, pid=1)]) == set()
    assert rules([before, waiter], LEASE, faults=[fault("stop", 11.0, 16.0, pid=1)]) == {"refused_for_a_reason"}


def test_answered_is_broken_by_silence():
    assert rules([Script(1).ask(10.0, 1.0).down()]) == {"answered"}
    assert rules([Script(1).ask(10.0, 1.0)], faults=[fault("kill", 10.2, 10.2, pid=1)]) == set()


def test_answered_is_broken_by_an_answer_that_comes_late():
    late = Script(1).ask(10.0, 1.0).at(16.0, "failed", why="").down()
    assert rules([late]) == {"answered"}
    assert rules([late], faults=[fault("stop", 10.5, 15.5, pid=1)]) == set()


def test_answered_is_broken_by_a_section_that_takes_long_to_leave():
    slow = Script(1).ask(10.0).enter(10.1, 5).at(10.2, "end", believes=True).at(20.0, "left", how="released").down()
    assert rules([slow]) == {"answered"}


def test_answered_is_broken_by_a_process_that_does_not_end():
    script = Script(1).section(10.0, 11.0, 5)
    assert rules([script]) == {"answered"}
    assert rules([script], faults=[fault("kill", 11.5, 11.5, pid=1)]) == set()


@pytest.mark.parametrize("found", [{"released": True}, {"extended": True}, {"took": False}])
def test_children_is_broken_by_a_child_that_ends_the_hold_of_its_parent(found):
    fine = {"released": False, "extended": False, "took": True}
    script = Script(1).ask(10.0).enter(10.1, 5).at(10.2, "fork", child=9).at(10.3, "child", **fine)
    assert rules([script.leave(10.4).down()]) == set()
    script = Script(1).ask(10.0).enter(10.1, 5).at(10.2, "fork", child=9).at(10.3, "child", **(fine | found))
    assert rules([script.leave(10.4).down()]) == {"children"}


# The rest


def test_what_is_left_over_is_a_violation():
    assert rules(two(), leftovers=["a row"]) == {"leftovers"}
    assert str(Violation("leftovers", "a row")) == "leftovers: a row"


def test_a_loaded_machine_gets_more_slack_and_a_stopped_process_does_not_count_as_one():
    script = Script(1).at(10.0, "lag", seconds=1.5).down()
    quiet = put_together([Script(1).down().events], [])
    loaded = put_together([script.events], [])
    stopped = put_together([script.events], [fault("stop", 8.0, 9.9, pid=1)])
    assert slack_of(quiet) == slack_of(stopped) < slack_of(loaded)


def test_figures_count_what_happened():
    history = put_together([script.events for script in two()], [])
    counted = figures(history, LEASE)
    assert (counted["sections"], counted["tries"], counted["processes"]) == (2, 2, 2)


def test_the_rules_that_the_guarantees_name_exist():
    named = {name for promise in guarantees.PROMISES for name in promise.rules}
    assert named == {rule.__name__ for rule in RULES}
