"""A relay from the outside: uploads, cut-through, dedup, ranges, holders, retention, metrics."""

from __future__ import annotations

from relay_driver import client, relay, state

ONE, TWO = state(1), state(2)


async def test_what_was_uploaded_and_committed_is_given_back_bit_for_bit(tmp_path) -> None:
    async with relay(data_dir=tmp_path) as one, client(one.address) as worker:
        assert (await worker.begin())["state"] == "begun"
        plan = await worker.manifest(ONE)
        assert (plan["agrees"], plan["chunks"], plan["lacking"], plan["lacks"]) == (True, 3, 3, "07")
        assert (await worker.show())["checkpoint"]["state"] == "planned"
        for chunk in ONE.chunks:
            await worker.put(chunk)
        assert (await worker.show())["checkpoint"]["state"] == "uploading"
        committed = await worker.commit()
        assert (committed["state"], committed["bytes"], committed["on_disk"]) == ("committed", len(ONE.pack), 3)
        assert await worker.call("GET", f"{worker.checkpoints}/c1/manifest") == ONE.manifest
        assert await worker.pack() == ONE.pack
        for digest, chunk in zip(ONE.digests, ONE.chunks, strict=True):
            assert await worker.chunk(digest) == chunk
