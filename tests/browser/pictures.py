"""Make the pictures of the dashboard for the README: ``python -m tests.browser.pictures docs/images``.

Four groups train for about two minutes. r3 is slower than the others; r1 gets SIGKILL, and is started again.
"""

from __future__ import annotations

import asyncio
import sys
import tempfile
from pathlib import Path

from tests.browser.devtools import RUNNING, Chromium, chromium
from tests.browser.told import HEADLINE, LIVE
from tests.support.jobs.job import Job
from tests.support.services.metrics_driver import metrics_process

PACE, SLOW = "0.05", "0.12"
"""Seconds that a step sleeps."""
STEPS_BEFORE, STEPS_WITHOUT, STEPS_AFTER = 400, 30, 250
LIMIT_SECONDS = 300
TWO_MINUTES = "[...document.querySelectorAll('button')].find((one) => one.textContent === '2 min').click()"
CHARTS = "document.querySelector('.charts').textContent"


async def main(images: Path, folder: Path) -> None:
    async with Job() as job, metrics_process("--lighthouse", job.address) as (_, url):
        for name in ("r0", "r1", "r2", "r3"):
            await job.start(name, TRAINER_PACE=SLOW if name == "r3" else PACE)
        others = [group for name, group in job.groups.items() if name != "r1"]
        await job.advance(steps=STEPS_BEFORE, seconds=LIMIT_SECONDS)
        job.groups["r1"].kill()
        await job.advance(*others, steps=STEPS_WITHOUT, seconds=LIMIT_SECONDS)
        await job.start("r1", TRAINER_PACE=PACE)
        await job.advance(steps=STEPS_AFTER, seconds=LIMIT_SECONDS)
        async with chromium(folder) as browser:
            for name, dark in (("dashboard", False), ("dashboard-dark", True)):
                page = await browser.open(f"{url}/#/job/default", width=1440, height=1050, dark=dark)
                await page.until(LIVE)
                await page.run(TWO_MINUTES)
                await page.until(f"{HEADLINE}.includes('r3 is slow') && {CHARTS}.includes('loss')")
                await page.screenshot(images / f"{name}.png")


if __name__ == "__main__":
    with tempfile.TemporaryDirectory() as place:
        images = Path(sys.argv[1])
        images.mkdir(parents=True, exist_ok=True)
        RUNNING.append(Chromium(Path(place)))
        try:
            asyncio.run(main(images, Path(place)))
        finally:
            RUNNING.pop().close()
