"""All tests of keepstep; CONTRIBUTING.md says what each folder tests."""
