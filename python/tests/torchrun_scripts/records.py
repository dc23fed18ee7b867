"""Records its error as torch's documentation says."""

from torch.distributed.elastic.multiprocessing.errors import record


@record
def main():
    raise ValueError("recorded")


main()
