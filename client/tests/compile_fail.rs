//! What must not compile, and how readably the compiler says so.

#[test]
fn mistakes_are_found_by_the_compiler_and_named() {
    trybuild::TestCases::new().compile_fail("tests/compile_fail/*.rs");
}
