from mlx_manager.cli import main

main()
