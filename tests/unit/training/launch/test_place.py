"""Who a process is among the ranks, from what torchrun and Slurm write into the environment."""

from __future__ import annotations

import re

import pytest

from tlt.base.types import UserError
from tlt.training.launch.place import Place, check_num_ranks, find_place

TORCHRUN = {
    "RANK": "5",
    "WORLD_SIZE": "8",
    "LOCAL_RANK": "1",
    "LOCAL_WORLD_SIZE": "4",
    "MASTER_ADDR": "host0",
    "MASTER_PORT": "29500",
    "TORCHELASTIC_USE_AGENT_STORE": "True",
    "TORCHELASTIC_RESTART_COUNT": "0",
}
SLURM = {
    "SLURM_PROCID": "5",
    "SLURM_NTASKS": "7",
    "SLURM_LOCALID": "1",
    "SLURM_NODEID": "1",
    "SLURM_NODELIST": "gpu[07-08]",
    "SLURM_TASKS_PER_NODE": "4,3",
    "SLURM_JOB_ID": "1234567",
}


def test_nobody_started_this_process_as_a_rank() -> None:
    assert find_place({}) is None


def test_torchrun_says_all_of_it_and_its_agent_has_the_store() -> None:
    assert find_place(TORCHRUN) == Place(5, 8, 1, 4, "host0", 29500)
    first = find_place({**TORCHRUN, "RANK": "0", "LOCAL_RANK": "0", "TORCHELASTIC_USE_AGENT_STORE": "False"})
    assert first is not None
    assert (first.is_leader, first.is_server, first.is_restart, first.listening) == (True, True, False, None)
    of_launcher = find_place({**TORCHRUN, "RANK": "0", "TLT_LISTENING": "9"})
    assert of_launcher is not None
    assert of_launcher.listening == 9


@pytest.mark.parametrize("name", ["TORCHELASTIC_RESTART_COUNT", "SLURM_RESTART_COUNT"])
def test_a_launcher_that_has_started_the_ranks_before_says_so(name: str) -> None:
    for environ in (TORCHRUN, SLURM):
        place = find_place({**environ, name: "2"})
        assert place is not None
        assert place.is_restart


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"RANK": "8"}, "rank 8, but there are 8 ranks"),
        ({"LOCAL_RANK": "4"}, "local rank 4, but there are 4 ranks of its machine"),
        ({"LOCAL_WORLD_SIZE": "9"}, "9 ranks on this machine, but 8 in all"),
        ({"WORLD_SIZE": None}, "WORLD_SIZE: RANK is set, but this is not"),
        ({"LOCAL_WORLD_SIZE": None}, "LOCAL_WORLD_SIZE: LOCAL_RANK is set, but this is not"),
        ({"MASTER_ADDR": None}, "MASTER_ADDR: RANK is set, but this is not"),
        ({"MASTER_PORT": "99999"}, "MASTER_PORT: 99999 is no port"),
        ({"RANK": "²"}, "RANK: '²' is no number"),
        ({"WORLD_SIZE": "9" * 5000}, "is no number"),
    ],
)
def test_a_contradiction_is_one_line_that_names_it(changes: dict[str, str | None], message: str) -> None:
    environ = {name: value for name, value in {**TORCHRUN, **changes}.items() if value is not None}
    with pytest.raises(UserError) as caught:
        find_place(environ)
    assert message in str(caught.value)
    assert "\n" not in str(caught.value)


def test_the_number_of_ranks_is_the_launchers() -> None:
    check_num_ranks(None, 2)
    check_num_ranks(find_place(TORCHRUN), 8)
    with pytest.raises(
        UserError, match=r"run\.num_ranks: is 2, but 8 ranks were started .* give --run\.num_ranks 8"
    ):
        check_num_ranks(find_place(TORCHRUN), 2)


def test_srun_names_the_rank_and_its_first_host_is_where_they_meet() -> None:
    place = find_place(SLURM)
    assert place == Place(5, 7, 1, 3, "gpu07", 15000 + 4567)
    assert find_place({**SLURM, "MASTER_ADDR": "a", "MASTER_PORT": "7"}) == Place(5, 7, 1, 3, "a", 7)
    first = find_place({**SLURM, "SLURM_PROCID": "0", "SLURM_LOCALID": "0", "SLURM_NODEID": "0"})
    assert first == Place(0, 7, 0, 4, "gpu07", 15000 + 4567, is_server=True)


def test_a_step_goes_before_its_job_and_a_single_task_starts_its_ranks_itself() -> None:
    step = {
        "SLURM_STEP_ID": "3",
        "SLURM_STEP_NUM_TASKS": "6",
        "SLURM_STEP_NODELIST": "a,b",
        "SLURM_STEP_TASKS_PER_NODE": "3(x2)",
    }
    assert find_place({**SLURM, **step}) == Place(5, 6, 1, 3, "a", 15000 + 4570)
    assert find_place({**SLURM, **step, "SLURM_STEP_NUM_TASKS": "1"}) is None


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"SLURM_NODELIST": ""}, "SLURM_NODELIST"),
        ({"SLURM_LOCALID": None}, "SLURM_LOCALID: SLURM_PROCID is set"),
        ({"SLURM_TASKS_PER_NODE": "4(x2)"}, "does not make SLURM_NTASKS = 7"),
        ({"SLURM_NODELIST": "a[x-y]"}, "SLURM_NODELIST: 'a[x-y]' is no list of hosts"),
    ],
)
def test_what_srun_would_not_say_is_refused(changes: dict[str, str | None], message: str) -> None:
    environ = {name: value for name, value in {**SLURM, **changes}.items() if value is not None}
    with pytest.raises(UserError, match=re.escape(message)):
        find_place(environ)


@pytest.mark.parametrize(
    ("nodelist", "host"),
    [
        ("login", "login"),
        ("node[01-03,7]", "node01"),
        ("a1,b[2-3].x,c", "a1"),
        ("rack[1-2]n[09-10]", "rack1n09"),
        ("gpu-[098-101],login", "gpu-098"),
        ("b[2-3].x,c", "b2.x"),
    ],
)
def test_lists_of_hosts_are_read_as_slurm_writes_them(nodelist: str, host: str) -> None:
    place = find_place({**SLURM, "SLURM_NODELIST": nodelist})
    assert place is not None
    assert place.master_addr == host
