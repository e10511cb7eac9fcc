"""How fast is the loader in one process, beside the floor of the machine? The short form, without peers.

    python benchmarks/loader.py                     # two minutes
    python benchmarks/loader.py --tokens 200M --rounds 5

It is `loader_throughput.py --no-peers --lengths 4096`: tokens only, with labels and with all fields. To
file a result, run that one whole.
"""

import sys

from loader_throughput import main

if __name__ == "__main__":
    if {"-h", "--help"} & set(sys.argv):
        print(__doc__)
    sys.argv[1:1] = ["--no-peers", "--lengths", "4096"]
    main()
