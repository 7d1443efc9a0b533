"""The key hash beside Java's own, over many keys: `python -m tests.client.java_partitioner CLASSPATH [COUNT]`.

CLASSPATH must have Kafka's client jar; java 11 or newer must be on the PATH. Prints how many keys agreed; exit status 1
and the first that did not, otherwise. Not part of the test suite, which compares with two other Python clients.
"""

import random
import subprocess
import sys
import tempfile
from pathlib import Path

from headrace.records.codec import murmur2

PROGRAM = """
import java.util.Scanner;
import org.apache.kafka.common.utils.Utils;
public class Hashes {
    public static void main(String[] args) {
        Scanner in = new Scanner(System.in);
        StringBuilder out = new StringBuilder();
        while (in.hasNextLine()) {
            String hex = in.nextLine();
            byte[] key = new byte[hex.length() / 2];
            for (int i = 0; i < key.length; i++)
                key[i] = (byte) Integer.parseInt(hex.substring(2 * i, 2 * i + 2), 16);
            out.append(Utils.murmur2(key)).append('\\n');
        }
        System.out.print(out);
    }
}
"""


def main(classpath: str, count: int) -> int:
    source = random.Random(1)
    keys = [source.randbytes(source.randrange(0, 64)) for _ in range(count)]
    with tempfile.TemporaryDirectory() as folder:
        program = Path(folder, "Hashes.java")
        program.write_text(PROGRAM)
        done = subprocess.run(
            ["java", "-cp", classpath, str(program)],
            input="\n".join(key.hex() for key in keys) + "\n",
            capture_output=True,
            text=True,
            check=False,
        )
    if done.returncode != 0:
        print(done.stderr, file=sys.stderr)
        return 1
    hashes = [int(line) & 0xFFFFFFFF for line in done.stdout.split()]
    if len(hashes) != count:
        print(f"{len(hashes)} hashes for {count} keys", file=sys.stderr)
        return 1
    for key, expected in zip(keys, hashes):
        if murmur2(key) != expected:
            print(f"key {key.hex()}: Java says {expected}, this client {murmur2(key)}", file=sys.stderr)
            return 1
    print(f"{count} keys have the same hash as in Java")
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1], int(sys.argv[2]) if len(sys.argv) > 2 else 100_000))
