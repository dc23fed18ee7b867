use super::*;

fn checkpoint(number: u64, loss: f64) -> Checkpoint {
    let metrics = BTreeMap::from([("loss".to_owned(), loss)]);
    Checkpoint { number, url: String::new(), metrics, files: Vec::new(), shape: Shape::default() }
}

async fn claim(storage: &Storage) -> Claim {
    Claim::new(storage, "test", &|_| (), std::future::pending()).await.unwrap().unwrap()
}

#[test]
fn the_newest_and_the_best_are_kept() {
    let all = [checkpoint(1, 0.5), checkpoint(2, 0.1), checkpoint(3, f64::NAN), checkpoint(4, 0.7)];
    let numbers = |keep: CheckpointConfig| keep.outdated(&all).iter().map(|old| old.number).collect::<Vec<_>>();
    assert_eq!(numbers(CheckpointConfig { newest: 2, best: None }), [1, 2]);
    assert_eq!(numbers(CheckpointConfig { newest: 0, best: None }), [1, 2, 3], "one is always kept");
    let best = |order| BestCheckpoints::of("loss", order);
    assert_eq!(numbers(CheckpointConfig { newest: 1, best: Some(best(ScoreOrder::Min)) }), [1, 3]);
    assert_eq!(numbers(CheckpointConfig { newest: 1, best: Some(best(ScoreOrder::Max)) }), [1, 2, 3]);
    assert_eq!(numbers(CheckpointConfig { newest: 1, best: Some(best(ScoreOrder::Min).count(2)) }), [3]);
    let mistyped = BestCheckpoints::of("los", ScoreOrder::Min);
    assert_eq!(numbers(CheckpointConfig { newest: 1, best: Some(mistyped.count(3)) }), [1], "as many as asked for");
    let same = [checkpoint(1, 0.1), checkpoint(2, 0.1), checkpoint(3, 0.7)];
    let keep = CheckpointConfig { newest: 1, best: Some(best(ScoreOrder::Min)) };
    assert_eq!(keep.outdated(&same).iter().map(|old| old.number).collect::<Vec<_>>(), [1], "of equal ones the newest");
}

#[test]
fn to_keep_none_is_refused_with_what_to_keep() {
    let wrong = |keep: CheckpointConfig| keep.check().unwrap_err();
    assert!(wrong(CheckpointConfig::newest(0)).contains("0 of the newest checkpoints"));
    let best = BestCheckpoints::of("loss", ScoreOrder::Min);
    assert!(
        wrong(CheckpointConfig::newest(1).best(best.clone().count(0))).contains("0 of the best checkpoints by `loss`")
    );
    assert_eq!(CheckpointConfig::newest(1).best(best).check(), Ok(()));
}

#[test]
fn a_metric_that_no_checkpoint_has_is_named_with_those_that_there_are() {
    let missing = |metric: &str, all: &[Checkpoint]| {
        CheckpointConfig::newest(1).best(BestCheckpoints::of(metric, ScoreOrder::Min)).missing_best(all)
    };
    let all = [checkpoint(1, 0.5), checkpoint(2, f64::NAN)];
    assert_eq!(
        missing("los", &all).unwrap(),
        "no checkpoint has the metric `los`: they have loss; the newest were kept instead of the best"
    );
    assert!(missing("loss", &all[1..]).unwrap().contains("`loss` is NaN in every checkpoint"));
    assert_eq!((missing("loss", &all), missing("los", &[])), (None, None));
    assert_eq!(CheckpointConfig::newest(1).missing_best(&all), None, "nobody asked for the best");
    let bare = Checkpoint { metrics: BTreeMap::new(), ..checkpoint(1, 0.5) };
    assert!(missing("loss", &[bare]).unwrap().contains("no metrics were reported with them"));
}

#[tokio::test]
async fn what_is_not_complete_is_not_there() {
    let (dir, files) = (tempfile::tempdir().unwrap(), tempfile::tempdir().unwrap());
    std::fs::create_dir(files.path().join("sub")).unwrap();
    std::fs::write(files.path().join("sub/rank 0.bin"), b"weights").unwrap();
    let storage = Storage::open(&dir.path().display().to_string()).unwrap();
    storage.probe().await.unwrap();
    let claim = claim(&storage).await;
    let listing = Listing::of(files.path()).unwrap();
    claim.begin(1).await.unwrap();
    storage.upload(1, files.path(), &listing).await.unwrap();
    assert!(storage.checkpoints().await.unwrap().is_empty());
    assert_eq!(claim.next().await.unwrap(), 1, "what was cut short is removed");
    assert!(storage.folders().await.unwrap().is_empty());

    for number in 1..=3 {
        claim.begin(number).await.unwrap();
        storage.upload(number, files.path(), &listing).await.unwrap();
        let metrics = BTreeMap::from([("loss".to_owned(), f64::INFINITY)]);
        claim.complete(number, &metrics, listing.clone()).await.unwrap();
        claim.remove_outdated(&CheckpointConfig::default()).await.unwrap();
    }
    let kept = storage.checkpoints().await.unwrap();
    assert_eq!(kept.iter().map(|kept| kept.number).collect::<Vec<_>>(), [2, 3]);
    assert_eq!(kept[1].metrics["loss"], f64::INFINITY);
    let (at, _) = storage.fetch(&kept[1]).await.unwrap();
    assert_eq!(std::fs::read(at.join("sub/rank 0.bin")).unwrap(), b"weights");
    assert_eq!(claim.next().await.unwrap(), 4);
    let error = claim.begin(3).await.unwrap_err();
    assert!(error.contains("checkpoint_000003 is there already"), "{error}");
    claim.begin(4).await.unwrap();
    let error = claim.complete(4, &BTreeMap::new(), listing).await.unwrap_err();
    assert!(error.contains("do all nodes share it"), "{error}");
}

#[tokio::test]
async fn a_storage_that_is_another_on_each_node_is_found_out() {
    let (here, there) = (tempfile::tempdir().unwrap(), tempfile::tempdir().unwrap());
    let [ours, theirs] = [&here, &there].map(|dir| Storage::open(&dir.path().display().to_string()).unwrap());
    ours.ask("x").await.unwrap();
    let error = theirs.answer_probe("x").await.unwrap_err();
    assert!(error.contains("what that wrote is not in it"), "{error}");
    // What the driver wrote is there, and its answer goes elsewhere.
    theirs.ask("x").await.unwrap();
    theirs.answer_probe("x").await.unwrap();
    let error = ours.hear("x").await.unwrap_err();
    assert!(error.contains("which cannot read it"), "{error}");
    ours.ask("y").await.unwrap();
    ours.answer_probe("y").await.unwrap();
    ours.hear("y").await.unwrap();
    assert_eq!(std::fs::read_dir(here.path()).unwrap().count(), 0, "probes are removed");
}

#[tokio::test]
async fn what_links_lead_to_stays() {
    let (dir, others) = (tempfile::tempdir().unwrap(), tempfile::tempdir().unwrap());
    std::fs::write(others.path().join("data"), b"precious").unwrap();
    let storage = Storage::open(&dir.path().display().to_string()).unwrap();
    let claim = claim(&storage).await;
    let folder = |number: u64| dir.path().join(name_of(number));
    for number in 1..=4 {
        claim.begin(number).await.unwrap();
        std::os::unix::fs::symlink(others.path(), folder(number).join("linked")).unwrap();
        claim.complete(number, &BTreeMap::new(), Listing::default()).await.unwrap();
        claim.remove_outdated(&CheckpointConfig::default()).await.unwrap();
        if number == 2 {
            // It is to be kept, elsewhere.
            let elsewhere = others.path().join("best");
            std::fs::rename(folder(2), &elsewhere).unwrap();
            std::os::unix::fs::symlink(&elsewhere, folder(2)).unwrap();
        }
    }
    assert!(!folder(1).exists() && folder(2).join(COMPLETE).exists() && folder(4).exists());
    assert_eq!(std::fs::read(others.path().join("data")).unwrap(), b"precious");
}

#[tokio::test]
async fn a_checkpoint_that_cannot_be_understood_is_passed_over_and_kept() {
    let dir = tempfile::tempdir().unwrap();
    let storage = Storage::open(&dir.path().display().to_string()).unwrap();
    let claim = claim(&storage).await;
    for number in 1..=2 {
        claim.begin(number).await.unwrap();
        claim.complete(number, &BTreeMap::new(), Listing::default()).await.unwrap();
        claim.remove_outdated(&CheckpointConfig::default()).await.unwrap();
    }
    let damaged = dir.path().join(name_of(2)).join(COMPLETE);
    std::fs::write(&damaged, "").unwrap();
    let numbers: Vec<u64> = storage.checkpoints().await.unwrap().iter().map(|there| there.number).collect();
    assert_eq!(numbers, [1]);
    let said = storage.damaged().await.unwrap();
    assert!(said.len() == 1 && said[0].contains("checkpoint_000002"), "{said:?}");
    assert_eq!(claim.next().await.unwrap(), 3);
    assert!(damaged.exists());
}

#[tokio::test]
async fn what_others_have_put_there_stays() {
    let dir = tempfile::tempdir().unwrap();
    let theirs = ["checkpoint_0", "checkpoint_7", "checkpoint_000000", "checkpoint_000001", "checkpoint_500", "other"];
    for folder in theirs {
        std::fs::create_dir_all(dir.path().join(folder).join("empty")).unwrap();
        std::fs::write(dir.path().join(folder).join("complete.json"), "{}").unwrap();
    }
    let storage = Storage::open(&dir.path().display().to_string()).unwrap();
    let claim = claim(&storage).await;
    let first = claim.next().await.unwrap();
    assert_eq!(first, 501);
    for number in first..first + 3 {
        claim.begin(number).await.unwrap();
        let file = tempfile::NamedTempFile::new().unwrap();
        let listing = Listing::of(file.path()).unwrap();
        storage.upload(number, file.path(), &listing).await.unwrap();
        claim.complete(number, &BTreeMap::new(), listing).await.unwrap();
        claim.remove_outdated(&CheckpointConfig { newest: 1, best: None }).await.unwrap();
    }
    // A copy of a checkpoint from another storage: it can be read, and is nobody's to remove.
    let copied = dir.path().join("checkpoint_000502");
    std::fs::rename(dir.path().join("checkpoint_000503"), &copied).unwrap();
    std::fs::write(copied.join(".wingbeat-made-in"), "another").unwrap();
    assert_eq!(storage.checkpoints().await.unwrap().len(), 1);
    claim.begin(504).await.unwrap();
    claim.complete(504, &BTreeMap::new(), Listing::default()).await.unwrap();
    claim.remove_outdated(&CheckpointConfig { newest: 1, best: None }).await.unwrap();
    let mut left: Vec<String> = std::fs::read_dir(dir.path())
        .unwrap()
        .map(|entry| entry.unwrap().file_name().into_string().unwrap())
        .filter(|name| !name.starts_with('.'))
        .collect();
    left.sort();
    let mut expected = [&theirs[..], &["checkpoint_000502", "checkpoint_000504"]].concat();
    expected.sort_unstable();
    assert_eq!(left, expected);
    assert!(theirs.iter().all(|folder| dir.path().join(folder).join("empty").exists()));
}

#[tokio::test]
async fn a_storage_that_cannot_be_written_is_named() {
    assert!(Storage::open("/proc/none/such").err().unwrap().contains("cannot make /proc/none/such"));
    let error = Storage::open("nothing://there").err().unwrap();
    assert!(error.contains("nothing://there"), "{error}");
}
