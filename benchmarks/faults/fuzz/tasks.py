"""A user's task does what it should not: where it is imported, where it makes its problems, and where it
scores."""

from __future__ import annotations

from random import Random

from benchmarks.faults.fuzz.case import Case, Place
from benchmarks.faults.fuzz.rewards import ENDS, HEADER, HELPERS, RAISES, RETURNS, STARTS
from benchmarks.faults.mutations import choices

MODULE = """
{header}
{at_import}

class Task:
    def problems(self, num, seed, split="train", **options):
        problems = [{{"problem_id": f"{{split}}-{{i}}", "prompt": f"[{{i + 1}},2:{{i + 3}}]"}} for i in range(num)]
        {change}
        return problems

    def score(self, problem, text):
        {score}
        return {{"reward": len(text) / 10, "solved": len(text) > 5}}
    {more}

TASK = Task()
"""
FIELDS = choices(r"""
    'problem_id' | 'prompt' | 'messages' | 'prompt_ids' | 'task' | 'x' | '' | None | 1 | 'completion_ids'
    'reward' | 'numbers' | 'log_metric' | '\ud800' | '\x1b[31m'
""")
VALUES = choices(r"""
    None | 1 | '' | [] | {} | '\ud800' | 'a\x00b' | '\x1b[31m' | 'x' * 100_000 | '../../x' | 'a\nb' | b'1'
    1e308 | float('nan') | {1, 2} | object() | print | [1, 2, 3] | [10**9] | [-1] | [1.5] | [True] | ['1']
    range(3) | Odd | [{'role': 'user', 'content': 'x'}] | [{'role': None}] | [[]] | [{}] | 10**400
    numpy('int64(1)') | iter([1]) | ' '
""")
CHANGES = choices("""
    problems = None | problems = [] | problems = {} | problems = iter(problems) | problems = problems[:1]
    problems *= 2 | problems[0] = None | problems[0] = [] | problems[0] = 'x' | problems[-1] = problems[0]
    problems[0] = {} | problems = 'abc' | problems[0]['problem_id'] = os.getpid()
    problems[1]['prompt'] += str(time.time()) | problems.append(problems) | print('x' * 10**6)
    os.chdir('/') | problems = problems * 1000 | problems[0].clear() | yield from problems
""")
AT_IMPORT = choices(r"""
    raise ImportError('odd') | import no_such_module | raise KeyError | raise SystemExit(3) | raise Odd
    def | x = '\ud800'.encode() | __getattr__ = lambda name: 1 / 0 | print('x' * 10**6)
    if IS_WORKER: os._exit(3) | if IS_WORKER: raise KeyboardInterrupt | if IS_WORKER: os.fork()
    if IS_WORKER: subprocess.Popen(['sleep', '300'], start_new_session=True) | deep(0) | raise BaseException
    if IS_WORKER: time.sleep(2) | threading.Thread(target=time.sleep, args=(1,)).start()
    os.environ['RANK'] = 'x'
""")
MORE = choices("""
    def __getattr__(self, name): raise Odd | def __getattr__(self, name): return self | warm_up = 1
    __slots__ = () | def warm_up(self, options): raise KeyboardInterrupt
    def warm_up(self, options): os._exit(1) | score = None | problems = 3
    def warm_up(self, options): time.sleep(2) | def warm_up(self): pass | def score(self): pass
    def problems(self): pass | async def score(self, problem, text): return {'reward': 1, 'solved': True}
    def warm_up(self, options): print('x' * 10**6)
""")
VERDICTS = choices("""
    None | 1.0 | {} | {'reward': 1} | {'solved': True} | {'reward': '1', 'solved': True}
    {'reward': None, 'solved': None} | {'reward': 1, 'solved': 'no'} | {'reward': 1, 'solved': []}
    {'reward': 1e308, 'solved': 2} | {'reward': Odd, 'solved': Odd}
    {'reward': OddNumber(), 'solved': True} | {'reward': 1, 'solved': numpy('array([1, 2])')}
    {'reward': 1j, 'solved': 1}
""")


def tasks(place: Place, rng: Random) -> Case:
    """A task is odd in one respect."""
    parts = {"at_import": "", "change": "", "score": "", "more": ""}
    match rng.randrange(7):
        case 0:
            parts["at_import"] = rng.choice(AT_IMPORT)
        case 1 | 2:
            parts["change"] = f"problems[{rng.choice((0, -1))}][{rng.choice(FIELDS)}] = {rng.choice(VALUES)}"
        case 3:
            parts["change"] = rng.choice((*CHANGES, *RAISES))
        case 4:
            parts["more"] = rng.choice(MORE)
        case 5:
            parts["score"] = rng.choice((*RAISES, *ENDS, *STARTS))
        case _:
            parts["score"] = f"return {rng.choice((*VERDICTS, *RETURNS))}"
    place.write("odd_tasks.py", MODULE.format(header=HEADER + HELPERS, **parts))
    words = ("--task.name", "odd_tasks:TASK", "--task.options", "{}", "--rewards.timeout_seconds", "1")
    prints = "print(" in "".join(parts.values())
    return place.train(*words, prints=prints, codes=frozenset({0, 2, 130}), about=str(parts))
