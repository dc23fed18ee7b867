"""Has a thread and an exit handler that outlive the script's last line."""

import atexit
import threading
import time

atexit.register(lambda: print("exit handler"))


def work():
    time.sleep(0.3)
    print("thread")


threading.Thread(target=work).start()
print("last line")
