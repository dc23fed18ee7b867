"""Asks, and stops in the debugger."""

name = input("name? ")
print("hello", name)
breakpoint()
print("after the debugger")
