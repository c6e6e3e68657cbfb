"""What happens to one sample, from its stored members to its row of a batch. See README.md in this folder."""
