"""What `duel bench` runs. Figures come as ratios measured side by side in one run, with the machine they came from."""
