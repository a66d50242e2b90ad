"""What a method tells of its inner workings, in every view: no view knows a method or a figure by name."""
