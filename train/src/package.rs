//! The Python that ranks run with, carried along: a node needs no package installed.
//!
//! It lies in the user's cache, in a folder that is named by its content, and is written there once.

use std::path::{Path, PathBuf};
use std::sync::OnceLock;

use crate::cache;

/// Files of the package, by their paths in it.
const FILES: [(&str, &str); 91] = [
    ("__init__.py", include_str!("../python/__init__.py")),
    ("_command.py", include_str!("../python/_command.py")),
    ("_errors.py", include_str!("../python/_errors.py")),
    ("_exceptions.py", include_str!("../python/_exceptions.py")),
    ("_function.py", include_str!("../python/_function.py")),
    ("_interrupts.py", include_str!("../python/_interrupts.py")),
    ("_job.py", include_str!("../python/_job.py")),
    ("_launcher.py", include_str!("../python/_launcher.py")),
    ("_lazy.py", include_str!("../python/_lazy.py")),
    ("_own_folder.py", include_str!("../python/_own_folder.py")),
    ("_rank_main.py", include_str!("../python/_rank_main.py")),
    ("_sending.py", include_str!("../python/_sending.py")),
    ("_warm.py", include_str!("../python/_warm.py")),
    ("torch.py", include_str!("../python/torch.py")),
    ("_files/__init__.py", include_str!("../python/_files/__init__.py")),
    ("_files/_contents.py", include_str!("../python/_files/_contents.py")),
    ("_files/_places.py", include_str!("../python/_files/_places.py")),
    ("_files/_reading.py", include_str!("../python/_files/_reading.py")),
    ("_trials/__init__.py", include_str!("../python/_trials/__init__.py")),
    ("_trials/_display.py", include_str!("../python/_trials/_display.py")),
    ("_trials/_engine.py", include_str!("../python/_trials/_engine.py")),
    ("_trials/_trial.py", include_str!("../python/_trials/_trial.py")),
    ("ml/__init__.py", include_str!("../python/ml/__init__.py")),
    ("ml/_columns.py", include_str!("../python/ml/_columns.py")),
    ("ml/_curves.py", include_str!("../python/ml/_curves.py")),
    ("ml/_derived.py", include_str!("../python/ml/_derived.py")),
    ("ml/_errors.py", include_str!("../python/ml/_errors.py")),
    ("ml/_examples.py", include_str!("../python/ml/_examples.py")),
    ("ml/_folds.py", include_str!("../python/ml/_folds.py")),
    ("ml/_order.py", include_str!("../python/ml/_order.py")),
    ("ml/_parquet.py", include_str!("../python/ml/_parquet.py")),
    ("ml/_progress.py", include_str!("../python/ml/_progress.py")),
    ("ml/_saving.py", include_str!("../python/ml/_saving.py")),
    ("ml/_sgd.py", include_str!("../python/ml/_sgd.py")),
    ("ml/_shards.py", include_str!("../python/ml/_shards.py")),
    ("ml/_shared.py", include_str!("../python/ml/_shared.py")),
    ("ml/_sklearn.py", include_str!("../python/ml/_sklearn.py")),
    ("ml/_source.py", include_str!("../python/ml/_source.py")),
    ("ml/_stored.py", include_str!("../python/ml/_stored.py")),
    ("ml/_sums.py", include_str!("../python/ml/_sums.py")),
    ("ml/_threads.py", include_str!("../python/ml/_threads.py")),
    ("ml/_torch_file.py", include_str!("../python/ml/_torch_file.py")),
    ("ml/_trials.py", include_str!("../python/ml/_trials.py")),
    ("ml/base.py", include_str!("../python/ml/base.py")),
    ("ml/classification.py", include_str!("../python/ml/classification.py")),
    ("ml/evaluation.py", include_str!("../python/ml/evaluation.py")),
    ("ml/feature.py", include_str!("../python/ml/feature.py")),
    ("ml/param.py", include_str!("../python/ml/param.py")),
    ("ml/pipeline.py", include_str!("../python/ml/pipeline.py")),
    ("ml/summarizer.py", include_str!("../python/ml/summarizer.py")),
    ("ml/tuning.py", include_str!("../python/ml/tuning.py")),
    ("train/__init__.py", include_str!("../python/train/__init__.py")),
    ("train/_ahead.py", include_str!("../python/train/_ahead.py")),
    ("train/_checkpoint.py", include_str!("../python/train/_checkpoint.py")),
    ("train/_config.py", include_str!("../python/train/_config.py")),
    ("train/_connection.py", include_str!("../python/train/_connection.py")),
    ("train/_context.py", include_str!("../python/train/_context.py")),
    ("train/_dataset.py", include_str!("../python/train/_dataset.py")),
    ("train/_dataset_errors.py", include_str!("../python/train/_dataset_errors.py")),
    ("train/_device.py", include_str!("../python/train/_device.py")),
    ("train/_formats.py", include_str!("../python/train/_formats.py")),
    ("train/_gather.py", include_str!("../python/train/_gather.py")),
    ("train/_lane.py", include_str!("../python/train/_lane.py")),
    ("train/_loop.py", include_str!("../python/train/_loop.py")),
    ("train/_order.py", include_str!("../python/train/_order.py")),
    ("train/_prepare.py", include_str!("../python/train/_prepare.py")),
    ("train/_process_group.py", include_str!("../python/train/_process_group.py")),
    ("train/_report.py", include_str!("../python/train/_report.py")),
    ("train/_result.py", include_str!("../python/train/_result.py")),
    ("train/_source.py", include_str!("../python/train/_source.py")),
    ("train/_storage.py", include_str!("../python/train/_storage.py")),
    ("train/_streaming.py", include_str!("../python/train/_streaming.py")),
    ("train/_trainer.py", include_str!("../python/train/_trainer.py")),
    ("train/_unsupported.py", include_str!("../python/train/_unsupported.py")),
    ("train/torch.py", include_str!("../python/train/torch.py")),
    ("tune/__init__.py", include_str!("../python/tune/__init__.py")),
    ("tune/_called.py", include_str!("../python/tune/_called.py")),
    ("tune/_cluster.py", include_str!("../python/tune/_cluster.py")),
    ("tune/_config.py", include_str!("../python/tune/_config.py")),
    ("tune/_experiment.py", include_str!("../python/tune/_experiment.py")),
    ("tune/_grid.py", include_str!("../python/tune/_grid.py")),
    ("tune/_same.py", include_str!("../python/tune/_same.py")),
    ("tune/_space.py", include_str!("../python/tune/_space.py")),
    ("tune/_terminated.py", include_str!("../python/tune/_terminated.py")),
    ("tune/_tied.py", include_str!("../python/tune/_tied.py")),
    ("tune/_trainable.py", include_str!("../python/tune/_trainable.py")),
    ("tune/_trial.py", include_str!("../python/tune/_trial.py")),
    ("tune/_tuner.py", include_str!("../python/tune/_tuner.py")),
    ("tune/schedulers.py", include_str!("../python/tune/schedulers.py")),
    ("tune/search/__init__.py", include_str!("../python/tune/search/__init__.py")),
    ("tune/search/optuna.py", include_str!("../python/tune/search/optuna.py")),
];

/// Changes with the content.
pub(crate) fn identity() -> &'static str {
    static IDENTITY: OnceLock<String> = OnceLock::new();
    IDENTITY.get_or_init(|| {
        let mut hasher = blake3::Hasher::new();
        for (name, text) in FILES {
            hasher.update(name.as_bytes()).update(&[0]).update(text.as_bytes()).update(&[0]);
        }
        hasher.finalize().to_hex()[..16].to_owned()
    })
}

/// The folder of the package on this node.
pub(crate) fn folder() -> std::io::Result<PathBuf> {
    let cache = cache::folder()?;
    let folder = cache.join(format!("python-{}", identity()));
    let package = folder.join("wingbeat");
    if cache::holds(&folder)? && package.exists() {
        return Ok(package);
    }
    let made = written_in(&cache).map_err(|error| {
        let what = "the Python files of ranks cannot be written; name a folder with room in XDG_CACHE_HOME";
        std::io::Error::new(error.kind(), format!("{}: {error}: {what}", cache.display()))
    })?;
    // All of it is there, or nothing; and if another was first, that is as good.
    if std::fs::rename(made.path(), &folder).is_err() && !package.exists() {
        return Err(std::io::Error::other(format!("cannot write {}", folder.display())));
    }
    Ok(package)
}

fn written_in(cache: &Path) -> std::io::Result<tempfile::TempDir> {
    let made = cache::new_folder(cache, "python-")?;
    for (name, text) in FILES {
        let file = made.path().join("wingbeat").join(name);
        file.parent().map_or(Ok(()), std::fs::create_dir_all)?;
        std::fs::write(file, text)?;
    }
    Ok(made)
}

#[cfg(test)]
mod tests {
    use std::collections::BTreeSet;

    use super::*;

    #[test]
    fn every_module_of_the_package_is_carried_along() {
        let root = Path::new(env!("CARGO_MANIFEST_DIR")).join("python");
        let (mut there, mut folders) = (BTreeSet::new(), vec![root.clone()]);
        while let Some(folder) = folders.pop() {
            for entry in std::fs::read_dir(folder).unwrap() {
                let path = entry.unwrap().path();
                match path.extension() {
                    _ if path.is_dir() => folders.push(path),
                    Some(extension) if extension == "py" => {
                        there.insert(path.strip_prefix(&root).unwrap().display().to_string());
                    }
                    _ => {}
                }
            }
        }
        assert_eq!(there, FILES.iter().map(|(name, _)| (*name).to_owned()).collect());
    }
}
