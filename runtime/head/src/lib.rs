//! Wingbeat control plane.
