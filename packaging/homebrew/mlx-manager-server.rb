# Written for Homebrew, and not yet run by us: see packaging/README.md.
class MlxManagerServer < Formula
  include Language::Python::Virtualenv

  desc "Inference server on MLX for OpenAI, Anthropic and Ollama clients"
  homepage "https://github.com/OWNER/mlx-manager"
  url "https://github.com/OWNER/mlx-manager/releases/download/v0.1.0/mlx_manager_server-0.1.0.tar.gz"
  sha256 "0000000000000000000000000000000000000000000000000000000000000000"
  license "MIT"

  depends_on arch: :arm64
  depends_on macos: :sonoma
  depends_on "python@3.13"

  def install
    # MLX comes as wheels alone, so pip resolves what it needs, and no resource blocks are listed.
    virtualenv_create(libexec, "python3.13", system_site_packages: false, without_pip: false)
    system libexec/"bin/python", "-m", "pip", "install", "--no-input", "#{buildpath}[vision]"
    # Models see by it; of its own needs they use only those of the extra.
    system libexec/"bin/python", "-m", "pip", "install", "--no-input", "--no-deps", "mlx-vlm>=0.7.10,<0.8"
    bin.install_symlink libexec/"bin/mlx-manager"
  end

  service do
    run [opt_bin/"mlx-manager", "serve"]
    keep_alive successful_exit: false
    log_path var/"log/mlx-manager.log"
    error_log_path var/"log/mlx-manager.log"
    working_dir HOMEBREW_PREFIX
  end

  test do
    assert_match version.to_s, shell_output("#{bin}/mlx-manager --version")
    port = free_port
    server = spawn bin/"mlx-manager", "serve", "--port", port.to_s
    begin
      system "curl", "--silent", "--fail", "--retry", "60", "--retry-delay", "1", "--retry-all-errors",
             "http://127.0.0.1:#{port}/health"
    ensure
      Process.kill "TERM", server
      Process.wait server
    end
  end
end
