//! The examples are programs of their own; see the other files here.
