"""A taskset of verifiers (v1) whose environment counts with the policy, by turns: see verifiers.toml.

Now from 412.    ─▶ 413     a right turn is answered by the next number
414              ─▶ 415
416              ─▶ 471     a wrong one ends the conversation
"""

from __future__ import annotations

from collections.abc import Iterator

import verifiers.v1 as vf

EXAMPLE = ("Let us count. I begin: 27", "28", "29", "30")


class Data(vf.TaskData):
    start: int


class Config(vf.TasksetConfig):
    largest: int = 999
    """Largest number that a count begins with."""


class CountingTask(vf.Task[Data]):
    pass


class Counting(vf.Taskset[CountingTask, Config]):
    def load(self) -> Iterator[CountingTask]:
        for start in range(10, self.config.largest + 1):
            said = [*EXAMPLE, f"Now from {start}."]
            prompt = [
                vf.AssistantMessage(content=text) if index % 2 else vf.UserMessage(content=text)
                for index, text in enumerate(said)
            ]
            yield CountingTask(Data(prompt=prompt, start=start), self.config.task)


class EnvConfig(vf.EnvConfig):
    player: vf.AgentConfig = vf.AgentConfig()
    num_turns: int = 4


class CountingEnv(vf.Env[EnvConfig]):
    async def run(self, task: CountingTask, agents: vf.Agents) -> None:
        number, num_right = task.data.start, 0
        async with agents.player.interaction(task) as talk:
            said = await talk.turn()
            while not said.terminated and said.last_reply.strip() == str(number + 1):
                num_right += 1
                if num_right == self.config.num_turns:
                    break
                number += 2
                said = await talk.turn(str(number))
        talk.trace.record_reward("counted", num_right / self.config.num_turns)


__all__ = ["Counting", "CountingEnv"]
