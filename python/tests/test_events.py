"""What TensorBoard would read of a run: TFRecords, with their checksums, of `Event` messages."""

import json
import struct
import time


def crc32c(data):
    """The checksum of iSCSI (RFC 3720)."""
    value = 0xFFFFFFFF
    for byte in data:
        value ^= byte
        for _ in range(8):
            value = value >> 1 ^ (0x82F63B78 if value & 1 else 0)
    return value ^ 0xFFFFFFFF


def masked(data):
    """As records have it: so that the checksum of data with a checksum in it is no special one."""
    value = crc32c(data)
    return ((value >> 15 | value << 17) + 0xA282EAD8) & 0xFFFFFFFF


def records(data):
    """The records of a file, each of which has a length, its checksum, the bytes, and theirs."""
    while data:
        (length, of_length), body = struct.unpack("<QI", data[:12]), data[12:]
        assert of_length == masked(data[:8])
        (of_body,) = struct.unpack("<I", body[length : length + 4])
        assert of_body == masked(body[:length])
        yield body[:length]
        data = body[length + 4 :]


def varint(data):
    value, shift = 0, 0
    while True:
        byte, data = data[0], data[1:]
        value, shift = value | (byte & 0x7F) << shift, shift + 7
        if byte < 0x80:
            return value, data


def fields(data):
    """The fields of a message of Protocol Buffers, by number."""
    while data:
        key, data = varint(data)
        if key & 7 == 0:
            value, data = varint(data)
        elif key & 7 == 2:
            length, data = varint(data)
            value, data = data[:length], data[length:]
        else:
            form, size = {1: ("<d", 8), 5: ("<f", 4)}[key & 7]
            (value,), data = struct.unpack(form, data[:size]), data[size:]
        yield key >> 3, value


def test_checksums_are_those_of_the_standard():
    assert crc32c(b"123456789") == 0xE3069283 and crc32c(bytes(32)) == 0x8A9136AA


def test_what_ranks_report_are_scalars_of_tensorboard_s(run, write, cluster, tmp_path):
    script = write("reports.py", """
        from wingbeat import train
        for step in range(3):
            train.report({"step": 100 * step, "loss": 1 / (step + 1), "big": float("inf")})
    """)
    begun = time.time()
    run("train", "-n", "2", "--storage", tmp_path / "stored", script, env=cluster)
    (file,) = (tmp_path / "stored").glob("events.out.tfevents.*")
    first, *events = [dict(fields(record)) for record in records(file.read_bytes())]
    # Event: 1 wall_time, 2 step, 3 file_version, 5 summary, whose values have 1 tag and 2 simple_value.
    assert first[3] == b"brain.Event:2"
    scalars = []
    for event in events:
        assert begun <= event[1] <= time.time()
        values = [dict(fields(value)) for number, value in fields(event[5]) if number == 1]
        scalars.append((event[2], {value[1].decode(): value[2] for value in values}))
    third = struct.unpack("<f", struct.pack("<f", 1 / 3))[0]
    inf = float("inf")
    assert scalars == [(0, {"loss": 1.0, "big": inf}), (100, {"loss": 0.5, "big": inf}), (200, {"loss": third, "big": inf})]
    lines = (tmp_path / "stored" / "metrics.jsonl").read_text().splitlines()
    assert [json.loads(line)["time"] for line in lines] == [event[1] for event in events]
