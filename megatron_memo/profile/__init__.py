"""What a run uses: storage accounting now, allocation traces later."""
